"""The copies between device and host pools, under the module name SGLang imports them from."""

from cpu_engine_shim.transfer_ops import *  # noqa: F403
