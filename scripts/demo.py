"""The steps of the demo; see demo.sh, which starts this in an environment with SGLang."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

import demo_report
from cpu_engine.server import CpuServer, ServerError, random_prompt
from cpu_engine.settings import ServerSettings
from cpu_engine.tiny_model import DegenerateOutputError, make_model
from demo_report import Expect, Row

from ucm_sglang.cli.support import output_console

ROOT = Path(__file__).resolve().parents[1]
MARKER = ".ucm-sglang-demo"
CAPACITY = "1GiB"
MIN_PROMPT, MAX_PROMPT = 1024, 8000
NEW_TOKENS = 16
WARM_UP_TOKENS = 100  # fewer than SGLang fetches from storage (prefetch_threshold, 256)
PASSED, FAILED, INTERRUPTED = 0, 1, 130
# On top of the printed flags: a hit must not depend on how busy this machine is.
OVERRIDE = ("--hicache-storage-prefetch-policy", "wait_complete")


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass
class Demo:
    """What the steps share: where things are, the two prompts, and what was measured so far."""

    work: Path
    prompts: dict[str, list[int]]
    rows: list[Row] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def store(self) -> Path:
        return self.work / "store"

    @property
    def config(self) -> Path:
        return self.work / "store.ucm-sglang.json"  # where `ucm-sglang init` writes it

    def say(self, message: str) -> None:
        print(f"[{time.monotonic() - self.started:4.0f} s] {message}", flush=True)

    def request(self, server: CpuServer, step: str, prompt: str, expect: Expect) -> None:
        """Send one prompt and keep what came of it."""
        result = server.generate(self.prompts[prompt], NEW_TOKENS, return_logprob=True)
        row = Row(step, prompt, expect, result)
        self.rows.append(row)
        self.say(f"{step}, prompt {prompt}: {result.storage} tokens from storage, {row.computed} computed")

    @contextlib.contextmanager
    def server(self, what: str, settings: ServerSettings) -> Iterator[CpuServer]:
        """A server, stopped as an operator stops it when all went well, and killed in any other case."""
        log = self.work / f"server-{len(self.logs) + 1}.log"
        log.unlink(missing_ok=True)
        self.logs.append(log)
        self.say(f"starting {what}; its log is {log}")
        server = CpuServer(settings, log, progress=self.say)
        try:
            server.start()
            first = len(self.logs) == 1
            self.say(
                "warm-up request" + (" (compiles SGLang's prefix hash if needed, 30 s)" if first else "")
            )
            server.generate(random_prompt(WARM_UP_TOKENS, seed=3))
            yield server
            server.wait_idle()
            self.say(f"stopping the server, process {server.pid} (about 10 s)")
            server.stop()
        finally:
            server.kill()


# ---- the steps ------------------------------------------------------------------------------------------


def make_store(demo: Demo) -> list[str]:
    """Make the store as a user does. Returns the flags for SGLang that the command prints."""
    text = ucm_sglang(["init", str(demo.store), "--capacity", CAPACITY], capture=True)
    words = shlex.split(text[text.index("sglang serve") :].replace("\\\n", " "))
    print(
        "\nThe demo starts SGLang with these flags, and those it needs to run on a CPU. One is changed: "
        f"{shlex.join(OVERRIDE)},\nso that it waits for storage however busy this machine is.\n"
    )
    return words[words.index("MODEL") + 1 :]


def with_store(demo: Demo, settings: ServerSettings) -> None:
    with demo.server("a server with the store", settings) as server:
        first_requests(demo, server, "store, cold")
        after_flush(demo, server, "store, after flush", "storage")
    with demo.server("the server again, as a new process", settings) as server:
        demo.request(server, "store, after restart", "A", "storage")
        demo.request(server, "store, after restart", "B", "storage")


def without_store(demo: Demo, settings: ServerSettings) -> None:
    with demo.server("a server without a store, to compare", settings) as server:
        first_requests(demo, server, "no store, cold")
        after_flush(demo, server, "no store, after flush", "computed")


def first_requests(demo: Demo, server: CpuServer, step: str) -> None:
    demo.request(server, step, "A", "computed")
    demo.request(server, step, "B", "device")


def after_flush(demo: Demo, server: CpuServer, step: str, expect: Expect) -> None:
    """Ask each prompt with empty caches on device and host, so that only a store can help."""
    for prompt in demo.prompts:
        server.flush_cache()
        demo.request(server, step, prompt, expect)


def server_settings(demo: Demo, model: Path, flags: Sequence[str], store: bool) -> ServerSettings:
    """A CPU server with the printed flags, which come last and so win; without a store, less those for it."""
    words = [*flags, *OVERRIDE]
    if not store:
        at = [i for i, word in enumerate(words) if word.startswith("--hicache-storage-")]
        words = [word for i, word in enumerate(words) if i not in at and i - 1 not in at]
    return ServerSettings(
        model=model,
        page_size=int(flags[flags.index("--page-size") + 1]),
        storage_backend="dynamic" if store else None,
        storage_extra_config=f"@{demo.config}" if store else None,
        max_total_tokens=max(8192, 3 * len(demo.prompts["A"])),
        extra_args=words,
    )


def ucm_sglang(arguments: Sequence[str], capture: bool = False) -> str:
    """Run the command line tool of this environment and show what it prints; returns that if asked to."""
    print(f"\n$ {shlex.join(['ucm-sglang', *arguments])}", flush=True)
    tool = Path(sys.executable).with_name("ucm-sglang")
    if not tool.exists():
        raise DemoError(f"{tool} does not exist; start the demo with scripts/demo.sh")
    done = subprocess.run(
        [str(tool), *arguments], stdout=subprocess.PIPE if capture else None, text=True, check=False
    )
    print(done.stdout or "", end="", flush=True)
    if done.returncode:
        raise DemoError(f"`ucm-sglang {arguments[0]}` ended with status {done.returncode}")
    return done.stdout or ""


def run(demo: Demo) -> list[str]:
    """All steps. Returns what went wrong, empty if nothing did."""
    demo.say("model: a tiny one with random weights, made here once")
    model = make_model(demo.work / "tiny-qwen3")
    flags = make_store(demo)
    settings = server_settings(demo, model, flags, store=True)
    with_store(demo, settings)
    without_store(demo, server_settings(demo, model, flags, store=False))
    console = output_console()
    print("\nPrompt tokens by where their KV cache came from:\n")
    console.print(demo_report.table(demo.rows, console))
    print(
        f"\nPrompts A and B have {len(demo.prompts['A']):,} tokens each, the first two thirds in common.\n"
        f"Largest difference of a log probability from the reference: {demo_report.drift(demo.rows):.3g}\n"
        "Seconds are those of a tiny model on a CPU: no benchmark, they say nothing about a GPU server.",
        flush=True,
    )
    ucm_sglang(["stats", str(demo.store)])
    ucm_sglang(["verify", str(demo.store)])
    return demo_report.problems(demo.rows, settings.page_size)


# ---- place, verdict -------------------------------------------------------------------------------------


def make_prompts(length: int) -> dict[str, list[int]]:
    """Two prompts of random tokens with the same first two thirds."""
    shared = length * 2 // 3
    prefix = random_prompt(shared, seed=0)
    return {name: prefix + random_prompt(length - shared, seed) for name, seed in (("A", 1), ("B", 2))}


def claim(work: Path) -> TextIO:
    """Take the work directory for this process, for as long as the returned file is open."""
    marker = work / MARKER
    if work.exists() and not marker.exists() and any(work.iterdir()):
        raise DemoError(f"--work {work}: holds files that are not the demo's; name a new or empty directory")
    work.mkdir(parents=True, exist_ok=True)
    lock = marker.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise DemoError(f"--work {work}: another demo is running there") from None
    return lock


def remove_store(demo: Demo) -> None:
    """Remove the demo's own store and config file, of this run or of one before."""
    if demo.store.exists():
        shutil.rmtree(demo.store)
    demo.config.unlink(missing_ok=True)


def report_failure(demo: Demo, why: Sequence[str]) -> None:
    """The verdict, below what the servers' logs say about the store."""
    for log in demo.logs:
        text = log.read_text(errors="replace") if log.exists() else ""
        ours = [
            line[:300]
            for line in text.splitlines()
            if "ucm-sglang: " in line or f"store {demo.store} " in line
        ]
        print("\n".join([f"\n{log}:", *(f"  {line}" for line in ours[-8:])]))
    print("\n".join(["", *(f"wrong: {what}" for what in why)]))
    more = f"; and {len(why) - 1} more, see above" if len(why) > 1 else ""
    print(f"demo: FAIL ({why[0]}{more})", flush=True)


def conduct(demo: Demo, keep: bool) -> int:
    """Run the demo with a fresh store and print the verdict; the exit status."""
    try:
        with claim(demo.work):
            remove_store(demo)
            why = run(demo)
            if not why and not keep:
                remove_store(demo)
    except KeyboardInterrupt:
        print("\ndemo: FAIL (interrupted)", flush=True)
        return INTERRUPTED
    except (DemoError, ServerError, DegenerateOutputError, OSError) as error:
        headline, _, rest = str(error).partition("\n")
        print(rest)
        why = [headline]
    if why:
        report_failure(demo, why)
        return FAILED
    print(f"\n{'Store kept' if keep else 'Store removed'}: {demo.store}")
    print(f"demo: PASS ({demo_report.summary(demo.rows)}; {time.monotonic() - demo.started:.0f} s)")
    return PASSED


def prompt_length(text: str) -> int:
    length = int(text)
    if not MIN_PROMPT <= length <= MAX_PROMPT:
        raise argparse.ArgumentTypeError(f"{length} is not from {MIN_PROMPT} to {MAX_PROMPT}")
    return length


def end(signum: int, frame: FrameType | None) -> None:
    """Leave as for Ctrl-C, so that servers are stopped."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="demo.sh", description="A true SGLang server with its KV cache on disk."
    )
    parser.add_argument("--keep", action="store_true", help="keep the store when the demo has passed")
    parser.add_argument("--work", type=Path, default=ROOT / ".work" / "demo", help="default: %(default)s")
    parser.add_argument(
        "--prompt-tokens", type=prompt_length, default=1500, metavar="N", help="default: 1500"
    )
    args = parser.parse_args(argv)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    demo = Demo(Path(os.path.abspath(args.work)), make_prompts(args.prompt_tokens))
    return conduct(demo, args.keep)


if __name__ == "__main__":
    sys.exit(main())
