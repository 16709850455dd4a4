#!/usr/bin/env python3
"""The store beside the raw limit of the machine and beside its peers, in one run in which all take turns.

    python scripts/bench_store.py --out DIRECTORY [--quick]
        [--stores raw raw-crc ours-native ours-python hicache-file ucm-posix vllm-fs nixl-posix]
        [--peers all|there|none]
        [--sizes 64k 1m] [--batches 1 16 128] [--media tmpfs disk disk-direct] [--verify both] [--hog both]
        [--rounds 5] [--operations transfers lookup open evict] [--checks lookup gil growth] [--dir DIRECTORY]
    python scripts/bench_store.py --out DIRECTORY --report-only

Run it with an interpreter that has this project; `scripts/env.sh bench` makes one that has matplotlib, too.
Each peer runs in the environment that `scripts/env.sh sglang|ucm|vllm|nixl` makes; a peer without one is
reported, not skipped.

Writes to the output folder: results.json, a list of records (see `store_bench/records.py`); checks.json, what
is no comparison of stores; about.json, the command, the machine and what could not run; report.md; *.png.
Ends with status 1 when a store returned wrong bytes, 2 when the run was ended early.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from store_bench.cases import BATCHES, MEDIA
from store_bench.geometries import parse_size
from store_bench.registry import STORES
from store_bench.session import CHECKS, OPERATIONS, run_session, write_report


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="output folder; made where it is not there")
    add("--quick", action="store_true", help="under a minute: 64 KiB and 1 MiB, batches of 128, tmpfs")
    add("--stores", nargs="+", choices=STORES, help="these stores only")
    add("--peers", choices=("all", "there", "none"), default="there",
        help="all: make the environments that are missing (minutes; vllm takes 3.5 GB)")  # fmt: skip
    add("--peers-dir", help="where the environments are (default: UCM_ENVS_DIR, else .envs)")
    add("--sizes", nargs="+", type=parse_size, help="block sizes, such as 64k or 1m")
    add("--batches", nargs="+", type=int, default=list(BATCHES))
    add("--media", nargs="+", choices=MEDIA)
    add("--verify", choices=("on", "off", "both"), default="both", help="of our own stores")
    add("--hog", choices=("off", "on", "both"), help="without, with, or both (default; --quick: off)")
    add("--rounds", type=int)
    add("--operations", nargs="*", choices=OPERATIONS)
    add("--checks", nargs="*", choices=CHECKS, help="default: all; --quick: none")
    add("--open-blocks", type=int, default=20_000, help="blocks in a store that is opened")
    add("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")
    add("--dir", type=Path, help="a folder on the disk to measure (default: the output folder)")
    add("--report-only", action="store_true", help="make report and plots again from what is in --out")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.report_only:
        write_report(options.out)
        return 0
    return run_session(options)


if __name__ == "__main__":
    # So that what was measured with is deleted when the run is ended early.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
