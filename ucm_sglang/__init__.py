"""ucm-sglang: keeps SGLang's KV cache on a POSIX file system, under verified, self-describing names."""
