"""The benchmark behind `scripts/bench_store.py`: block stores side by side, taking turns in one run.

Each store runs in a child process of its own interpreter (`child.py`), which times only the operation
itself; the parent (`runner.py`) tells one child after the other to take a turn. Modules used in a child
import nothing but numpy at the top, because a peer's interpreter has no more than that.
"""
