"""Must hold 8: SGLang's own fault injectors around our backend, on a true server."""

from __future__ import annotations

import pytest
from cpu_engine.server import random_prompt
from cpu_engine.tiny_model import require_varied_output
from sglang_fleet import Fleet, all_from_storage, assert_same

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("clean_log"),
]


def test_output_stays_right_with_random_failures_and_delays(fleet: Fleet) -> None:
    """Must hold 8: a third of all calls fail, each waits up to 50 ms; some rounds hit, some miss."""
    injectors = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.33",
    }
    server = fleet.get(fleet.settings(page_size=16, env=injectors))
    prompts = [random_prompt(600 + 150 * i, seed=80 + i) for i in range(5)]
    cold = [server.generate(prompt, return_logprob=True) for prompt in prompts]
    assert "HiCache storage test injector enabled" in fleet.whole_log()
    require_varied_output([one.output_ids for one in cold])
    found = wanted = 0
    for _ in range(4):
        server.flush_cache()
        for prompt, reference in zip(prompts, cold, strict=True):
            got = server.generate(prompt, return_logprob=True)
            assert_same(got, reference)
            found += got.storage
            wanted += all_from_storage(prompt, 16)
    assert 0 < found < wanted
