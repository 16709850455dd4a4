"""What the figures of a report mean."""

from __future__ import annotations

DEFINITIONS = """\
* **GB/s**: bytes of the batch (10^9 in a GB) through the median over rounds of a round's median seconds. In
  a round each store has one turn; turns of one round follow each other, and their order moves on by one
  each round.
* **Seconds** are taken with `perf_counter` in the store's own process, around the store's call only: ids,
  paths and addresses are prepared before. Getting the GIL back after a call is part of it.
* **Spread**: least and most of the rounds.
* **Ratio**: other's seconds through this store's seconds, round by round; its median. Above 1, this store
  is faster.
* **dump**: a batch of blocks that the store does not have, from page-aligned anonymous memory that was
  touched before. It ends when the store says that the blocks are stored: in the page cache (buffered) or
  written (direct); no store calls `fsync`. The first batch of a turn, which makes files and directories, is
  not timed. After it and after each dump twice the time passes that it took, and 50 ms at least: a server
  computes between two batches, and a store may get space ready meanwhile. **dump-sustained**: dumps that
  follow each other at once.
* **load**: a batch in the order in which it was dumped. **load-shuffled**: the same blocks in random order.
  **load-interleaved**: each next block from another of 8 dumped batches (of batches an eighth as large where
  a turn has fewer than 8). What is loaded was just dumped: it is in the page cache, unless I/O is direct.
* **lookup**: how many of 2,000 stored keys are there; keys a second. Each store gets the form of key it
  takes.
* **open**: from nothing to the first lookup that finds a block, in a process that has imported what it
  needs. HiCacheFile reads nothing when it is opened, and UCM only makes its directories.
* **dump-evicting**: dumps into a store that is at its capacity, so that it must delete as much as it
  stores. Of the others only HiCacheFile evicts in a dump; UCM collects garbage every 30 s, vLLM's tier and
  NIXL never.
* **verify**: ours compares the CRC-32C of every block that is loaded; a dump computes it always. `raw-crc`
  does both. Peers verify nothing.
* **raw**: a loop in C over one file, without the GIL, the best of one and two threads (which are kept
  between batches) and of calls of 256 KiB (4 MiB where I/O is direct) and as large as may be; which one it
  was is in the field `facts` of results.json. Its space is allocated before the clock starts, and each dump
  writes space that was not written before. Blocks are moved in the order of the file. **raw-crc**: the same
  in the smaller calls, with the CRC-32C of what each moves. **raw-unallocated**: the same as raw, into a
  file without space.
* **hog**: a thread that runs pure Python in the store's process. **Hog rate**: its loops a second while
  calls of the store run, through those while calls of raw run, round by round.
* **Compared bytes**: after each load the first 16 bytes of every block are compared, and once for every
  store, case and order the whole blocks; a difference fails the run.
* **tmpfs**: `/dev/shm`. **disk**: buffered on the file system of `--dir`, in the page cache.
  **disk-direct**: the same file system with O_DIRECT, where a store has it.
"""
