"""Parts of scripts/soak_server.py: a true SGLang server under multi-turn load and a store too small."""
