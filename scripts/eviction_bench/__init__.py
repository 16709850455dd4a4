"""Parts of scripts/bench_eviction.py: what eviction costs dumps, loads, memory and opening."""
