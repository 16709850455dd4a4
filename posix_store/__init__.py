"""posix_store: a block store on POSIX file systems for KV cache. Knows nothing of engines or tokens.

>>> with PosixStore("/mnt/nvme/kv", "0" * 32, capacity=500 << 30) as store:
...     store.dump([block_id], None, [page]).results()
...     store.load([block_id], None, [empty_page]).results()
"""

from posix_store.errors import Reason, StoreError
from posix_store.opening import open_store
from posix_store.reports import StoreStats, VerifyReport
from posix_store.store import PosixStore
from posix_store.striped import StripedStore
from posix_store.syscalls import Syscalls
from posix_store.task import Task

__all__ = [
    "PosixStore",
    "Reason",
    "StoreError",
    "StoreStats",
    "StripedStore",
    "Syscalls",
    "Task",
    "VerifyReport",
    "open_store",
]
