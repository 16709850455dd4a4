"""`ucm-sglang`: the command line. One module per command; here the parser and what errors look like.

Exit status of every command: 0 well, 1 the command found damage, 2 wrong usage, configuration or path.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from posix_store import StoreError
from ucm_sglang.cli import clear, doctor, du, evict, init, inspect, pin, pins, stats, verify
from ucm_sglang.config import ConfigError

_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. `SystemExit` for `--help`, `--version` and wrong usage."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="ucm-sglang: %(message)s")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except (ConfigError, StoreError) as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of our output has left; Python must not try to flush it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        _fail("interrupted")
        return _INTERRUPTED
    return status


def _fail(message: str) -> int:
    print(f"ucm-sglang: {message}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ucm-sglang", description="Keeps SGLang's KV cache on a POSIX file system."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (init, doctor, stats, du, inspect, verify, evict, clear, pin, pins):
        command.add_parser(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("ucm-sglang")
    except metadata.PackageNotFoundError:
        return "(not installed)"
