"""On the device: requests that share pages get the tokens and logprobs that they get without any cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_engine import NUM_TOKEN_IDS, collect, drain, tokens_of

from jaxserve.engine import Engine
from jaxserve.request import RequestOutput, SamplingParams

TOLERANCE = 1e-4


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Sixteen prompts on two stems, cut at and around the edges of pages (8) and blocks (16), of mixed parameters."""
    rng = np.random.default_rng(11)
    stems = [rng.integers(3, NUM_TOKEN_IDS, 64).tolist() for _ in range(2)]
    several = []
    for number in range(16):
        stem = stems[number % 2][: int(rng.choice([7, 8, 9, 16, 31, 32, 33, 48, 63, 64]))]
        prompt = stem + rng.integers(3, NUM_TOKEN_IDS, int(rng.integers(1, 20))).tolist()
        options: dict[str, Any] = {"max_tokens": 24, "seed": number, "logprobs": 2, "ignore_eos": True}
        options["temperature"] = float(rng.choice([0.0, 0.8]))
        if number % 3 == 0:
            options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5}
        if number % 5 == 0:
            options |= {"logit_bias": {5: 3.0}, "min_tokens": 4, "bad_word_ids": ((6, 7),)}
        several.append((prompt, SamplingParams(**options)))
    return several


def run(engine: Engine, rounds: int = 1, flush: bool = False) -> list[dict[str, list[RequestOutput]]]:
    """All requests at once, as often as asked."""
    results = []
    for _ in range(rounds):
        for number, (prompt, params) in enumerate(requests()):
            engine.add(str(number), prompt, params)
        outputs: dict[str, list[RequestOutput]] = {}
        if flush:
            for _ in range(6):
                collect(outputs, engine.step())
            engine.flush_cache()
        for name, more in drain(engine).items():
            collect(outputs, more)
            assert outputs[name]
        engine.check_integrity()
        results.append(outputs)
    return results


def assert_same(mine: dict[str, list[RequestOutput]], other: dict[str, list[RequestOutput]]) -> None:
    for name, outputs in other.items():
        assert tokens_of(mine[name]) == tokens_of(outputs), name
        for a, b in zip(mine[name], outputs, strict=True):
            assert a.finish_reason == b.finish_reason
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert abs(x.logprob - y.logprob) < TOLERANCE


@pytest.fixture(scope="module")
def uncached(tiny_engine: Callable[..., Engine]) -> dict[str, list[RequestOutput]]:
    engine = tiny_engine(prefix_caching=False)
    (outputs,) = run(engine)
    assert engine.stats().prefix_cache_hits_total == engine.stats().pages_cached == 0
    return outputs


def test_hits_change_neither_tokens_nor_logprobs(
    tiny_engine: Callable[..., Engine], uncached: dict[str, list[RequestOutput]]
) -> None:
    engine = tiny_engine()
    first, second = run(engine, rounds=2)
    assert_same(first, uncached)
    assert_same(second, uncached)
    for name, (prompt, _) in enumerate(requests()):
        assert second[str(name)][0].num_cached_tokens == (len(prompt) - 1) // 8 * 8, "the second time all was there"


def test_a_preempted_request_that_finds_its_own_pages_again_leaves_no_trace(
    tiny_engine: Callable[..., Engine], uncached: dict[str, list[RequestOutput]]
) -> None:
    engine = tiny_engine(num_pages=1 + 34)
    for outputs in run(engine, rounds=2):
        assert_same(outputs, uncached)
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_evictions_total > 0


def test_a_flush_in_the_middle_leaves_no_trace(
    tiny_engine: Callable[..., Engine], uncached: dict[str, list[RequestOutput]]
) -> None:
    for outputs in run(tiny_engine(), rounds=2, flush=True):
        assert_same(outputs, uncached)
