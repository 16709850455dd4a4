"""Time to first token of a true SGLang server on a CPU: KV cache from storage, or computed again.

Run it with scripts/bench_ttft.py.
"""
