#!/usr/bin/env python3
"""Time to first token of a true SGLang server on this machine's CPU, and what write-through costs.

    .envs/sglang/bin/python scripts/bench_ttft.py --out DIRECTORY [--quick]
        [--lengths 1024 2048 4096] [--rounds 8] [--prompts 2] [--seed 0] [--dir DIRECTORY]

Compared: this project's store (`ours`), SGLang's own HiCacheFile (`file`), and no storage (`none`, which
computes everything). One server is attached to each in turn. Prompts whose prefix is only in the storage are
timed, which shows what reading from it takes; and prompts that nobody has seen, which show what writing
costs.

Writes to the output folder: ttft.json (figures and every sample), ttft.md, and server.log. Needs the
environment that `scripts/env.sh sglang` makes. Takes 6 to 10 minutes on two cores that have nothing else
to do, with --quick less than 3.

Exit status: 0 valid figures, whatever the verdicts; 1 the server failed, or an answer was wrong, or tokens
came from elsewhere than they should; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cpu_engine.server import ServerError
from ttft_bench.plan import Plan
from ttft_bench.session import NoSpaceError, run_session

VALID, INVALID, USAGE, INTERRUPTED = 0, 1, 2, 130
SHM = Path("/dev/shm")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="output folder; made where it is not there")
    add("--quick", action="store_true", help="unless given: lengths 512 1024 2048, 3 rounds")
    add("--lengths", type=int, nargs="+", help="tokens, multiples of 64; default 1024 2048 4096")
    add("--rounds", type=int, help="default 8")
    add("--prompts", type=int, default=2, help="of each length in a round; default %(default)s")
    add("--seed", type=int, default=0, help="other seeds give other prompts")
    add("--dir", type=Path, help="folder for the stores; default /dev/shm, or else the output folder")
    args = parser.parse_args(argv)
    lengths, rounds = ([512, 1024, 2048], 3) if args.quick else ([1024, 2048, 4096], 8)
    try:
        args.plan = Plan(
            tuple(lengths if args.lengths is None else args.lengths),
            rounds if args.rounds is None else args.rounds,
            args.prompts,
            args.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    if args.dir is not None and not args.dir.is_dir():
        parser.error(f"--dir {args.dir}: no such folder")
    return args


def end(signum: int, frame: FrameType | None) -> None:
    """Leave as for Ctrl-C, so that the server is ended and what was stored is removed."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if importlib.util.find_spec("sglang") is None:
        print(f"{sys.executable} has no SGLang; `scripts/env.sh sglang` makes an environment that has it")
        return USAGE
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {message}", flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    where = args.dir or (SHM if SHM.is_dir() else args.out)
    command = shlex.join(["python", *sys.argv])
    try:
        wrong = run_session(args.plan, args.out.resolve(), where.resolve(), command, say)
    except KeyboardInterrupt:
        print("\nbench_ttft: interrupted", flush=True)
        return INTERRUPTED
    except (NoSpaceError, ServerError) as error:
        print(f"bench_ttft: {error}", flush=True)
        return INVALID
    for what in wrong:
        print(f"wrong: {what}", flush=True)
    return INVALID if wrong else VALID


if __name__ == "__main__":
    sys.exit(main())
