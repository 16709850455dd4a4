"""The process in which one store runs: `python -m store_bench.child STORE`.

Requests and answers are JSON lines on the standard input and output; what a peer prints goes to standard
error. Every answer has "ok": true and

    {"do": "open", "spec": {...}}     {"facts": {...}, "preallocated": "..."}
    {"do": "turn", "plan": {...}}     {"ways": {way: {"samples": {operation: [seconds]}, "hog_rates": {...}}}}
    {"do": "close"}                   nothing else
    {"do": "check", "name": "...", "directory": "..."}  {"rows": [...]}

A failure is {"ok": false, "kind": "cannot run" | "wrong bytes" | "error", "reason": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from store_bench.registry import REGISTRY, make_store
from store_bench.stores.base import CannotRun, Spec, StoreUnderTest
from store_bench.turn import WrongBytes, run_turn


class Child:
    """Answers requests about one store."""

    def __init__(self, name: str) -> None:
        self._entry = REGISTRY[name]
        self._store: StoreUnderTest | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, **getattr(self, "_" + request["do"])(request)}
        except CannotRun as error:
            return {"ok": False, "kind": "cannot run", "reason": str(error)}
        except WrongBytes as error:
            return {"ok": False, "kind": "wrong bytes", "reason": str(error)}
        except Exception as error:
            traceback.print_exc()
            return {"ok": False, "kind": "error", "reason": f"{type(error).__name__}: {error}"}

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        self._close(request)
        self._store = make_store(self._entry, Spec(**request["spec"]))
        return {"facts": self._store.facts(), "preallocated": self._store.preallocated}

    def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._store is not None, "open comes first"
        return run_turn(self._store, request["plan"])

    def _close(self, request: dict[str, Any]) -> dict[str, Any]:
        store, self._store = self._store, None
        if store is not None:
            store.close()
        return {}

    def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        from store_bench.checks import run_in_this_process

        return {"rows": run_in_this_process(request["name"], request["directory"])}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    child = Child(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(child.answer(json.loads(line))), file=answers, flush=True)
    child.answer({"do": "close"})
    # Threads of a peer may never end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
