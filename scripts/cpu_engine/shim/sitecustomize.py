"""Loaded by Python at start because this folder is on PYTHONPATH: arms the CPU shim.

Server processes and everything they spawn inherit PYTHONPATH, so all of them are covered.
Nothing happens in a process that never imports SGLang (see cpu_engine_shim).
"""

import cpu_engine_shim

cpu_engine_shim.install()
