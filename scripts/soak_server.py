"""A true SGLang server under multi-turn load with a store that holds a tenth of the working set.

    PATH=.envs/sglang/bin:$PATH python scripts/soak_server.py [--minutes 30] [--seed N] [--json FILE]

Two servers with the same tiny model run on this machine's CPUs and answer the same prompts, greedily: one
with the store, and with device and host pools that hold a few conversations; one without HiCache. Hundreds of
conversations share a system prompt, repeat their history, and go on now or much later. The server with the
store is killed and started again in the middle. Checked: token ids and log probabilities are equal, the log
is clean, the store keeps within its capacity, pages are evicted and others found until the end, memory and
descriptors do not grow, and at the end every page in the store is whole.

Nearly all requests run one at a time on each server, because on a CPU another batch may round differently and
so decide otherwise between two tokens that are equally likely. Some rounds of four at once check the rest;
scripts/server_soak/answers.py says how they are judged.

A line is printed every 10 s, and a verdict at the end. Starting the servers takes 1 to 3 minutes on top of
--minutes. Exit status: 0 passed, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from server_soak.run import Settings, Soak
from server_soak.verdict import Verdict, judge
from server_soak.workload import LONG, SHORT

PASSED, FAILED, INTERRUPTED = 0, 1, 130
MINUTES, QUICK_MINUTES = 30.0, 2.0
ROUNDS, QUICK_ROUNDS = 30, 4


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=positive, help=f"of load; default {MINUTES:g}, with --quick {QUICK_MINUTES:g}")
    add("--quick", action="store_true", help="a small store and short conversations")
    add("--seed", type=int, default=0, help="other seeds give other conversations; default 0")
    add("--json", type=Path, metavar="FILE", help="write checks and figures there")
    add("--concurrent", type=int, metavar="N",
        help=f"rounds of four requests at once; default {ROUNDS}, with --quick {QUICK_ROUNDS}")  # fmt: skip
    add("--work", type=Path, metavar="DIR",
        help="new directory for model, store and logs, kept at the end; default: a temporary one, which is "
        "kept if a check failed")  # fmt: skip
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace, directory: Path) -> Settings:
    minutes, rounds = (QUICK_MINUTES, QUICK_ROUNDS) if args.quick else (MINUTES, ROUNDS)
    return Settings(
        minutes=args.minutes or minutes,
        seed=args.seed,
        shape=SHORT if args.quick else LONG,
        directory=directory,
        concurrent=rounds if args.concurrent is None else args.concurrent,
    )


def report(verdict: Verdict, target: Path | None) -> None:
    """Print the checks and write the JSON file."""
    print("\n".join(["", "verdict:", *verdict.lines()]), flush=True)
    if target is not None:
        found = {"ok": verdict.ok, "checks": [asdict(check) for check in verdict.checks], **verdict.numbers}
        target.write_text(json.dumps(found, indent=1) + "\n")


def end(signum: int, frame: FrameType | None) -> None:
    """Leave as for Ctrl-C, so that the servers are ended."""
    raise KeyboardInterrupt


def conduct(settings: Settings, target: Path | None, keep: bool) -> int:
    """Run the soak and print the verdict; the exit status."""
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {message}", flush=True)

    say(f"seed {settings.seed}, {settings.minutes:g} minutes of load, in {settings.directory}")
    soak = Soak(settings, say)
    try:
        soak.run()
        verdict = judge(soak)
    except KeyboardInterrupt:
        print(f"\nsoak_server: FAIL (interrupted; logs and store are in {settings.directory})", flush=True)
        return INTERRUPTED
    report(verdict, target)
    if not verdict.ok:
        why = verdict.failed()[0][:300]
        print(f"soak_server: FAIL ({why}); logs and store are in {settings.directory}", flush=True)
        return FAILED
    if not keep:
        shutil.rmtree(settings.directory)
    answers, seconds = len(soak.records.requests), time.monotonic() - started
    print(f"soak_server: PASS ({answers} answers, all right; {seconds:.0f} s)", flush=True)
    return PASSED


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.work is not None and args.work.exists():
        print(f"--work {args.work}: exists; name a new directory", file=sys.stderr)
        return 2
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    directory = args.work or Path(tempfile.mkdtemp(prefix="soak-server-"))
    directory.mkdir(parents=True, exist_ok=True)
    return conduct(chosen(args, directory.resolve()), args.json, keep=args.work is not None)


if __name__ == "__main__":
    sys.exit(main())
