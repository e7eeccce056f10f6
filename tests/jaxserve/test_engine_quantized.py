"""Narrow pages: whatever happens to them, a request gets the tokens that it gets alone, near those of floats."""

import functools
from typing import Literal

import numpy as np
import pytest
from kv_format_reference import NARROW
from tiny_engine import NUM_TOKEN_IDS, build_tiny_engine, drain, tokens_of

from jaxserve.engine import Engine
from jaxserve.request import RequestOutput, SamplingParams
from pallas_kernels.kv_dtype import KVDtype

NUM_REQUESTS = 12
MAX_TOKENS = 16
# A number that float rounding moves over the middle between two codes moves a whole step: rare, and small.
TOLERANCE = 0.02
# Of a log-probability, to float pages: the median over all of each request's first tokens.
FORMAT_ERROR: dict[KVDtype, float] = {"int8": 0.02, "fp8_e4m3": 0.15, "fp8_e5m2": 0.2, "int4": 0.5}

Outputs = list[list[RequestOutput]]  # of each request


@functools.cache
def prompts() -> list[list[int]]:
    """On two stems, cut at and around the edges of pages (8) and blocks (16)."""
    rng = np.random.default_rng(5)
    stems = rng.integers(3, NUM_TOKEN_IDS, (2, 64)).tolist()
    lengths = (8, 9, 15, 16, 31, 32, 33, 48, 55, 56, 63, 64)
    return [stems[i % 2][:length] + rng.integers(3, NUM_TOKEN_IDS, 1 + i).tolist() for i, length in enumerate(lengths)]


def engine_of(
    dtype: KVDtype | Literal["auto"],
    *,
    num_pages: int = 1 + 8 * 24,
    max_num_batched_tokens: int = 72,
    host_pages: int = 0,
) -> Engine:
    return build_tiny_engine(
        cache_dtype=dtype,
        decode_buckets=(8,),
        prefill_buckets=(4,),
        num_pages=num_pages,
        max_num_batched_tokens=max_num_batched_tokens,
        host_pages=host_pages,
    )


def add(engine: Engine, number: int) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    engine.add(str(number), prompts()[number], params)


def together(engine: Engine) -> Outputs:
    for number in range(NUM_REQUESTS):
        add(engine, number)
    outputs = drain(engine)
    engine.check_integrity()
    return [outputs[str(number)] for number in range(NUM_REQUESTS)]


@functools.cache
def alone(dtype: KVDtype | Literal["auto"]) -> Outputs:
    engine = engine_of(dtype)
    outputs = []
    for number in range(NUM_REQUESTS):
        add(engine, number)
        outputs.append(drain(engine)[str(number)])
        engine.flush_cache()
    assert all(of_request[0].num_cached_tokens == 0 for of_request in outputs)
    return outputs


def assert_same(run: Outputs, expected: Outputs) -> None:
    for mine, other in zip(run, expected, strict=True):
        assert tokens_of(mine) == tokens_of(other)
        for a, b in zip(mine, other, strict=True):
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert abs(x.logprob - y.logprob) < TOLERANCE


@pytest.mark.parametrize("dtype", NARROW)
def test_hits_give_the_same_tokens(dtype: KVDtype) -> None:
    engine = engine_of(dtype)
    assert_same(together(engine), alone(dtype))
    second = together(engine)
    assert_same(second, alone(dtype))
    assert [outputs[0].num_cached_tokens for outputs in second] == [(len(p) - 1) // 8 * 8 for p in prompts()]


@pytest.mark.parametrize("dtype", NARROW)
def test_preempted_and_evicted_pages_leave_no_trace(dtype: KVDtype) -> None:
    engine = engine_of(dtype, num_pages=1 + 34)
    for _ in range(2):
        assert_same(together(engine), alone(dtype))
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_evictions_total > 0


@pytest.mark.parametrize("dtype", NARROW)
def test_pages_that_went_to_the_host_and_back_have_their_scales_with_them(dtype: KVDtype) -> None:
    engine = engine_of(dtype, num_pages=1 + 34, host_pages=100)
    for _ in range(2):
        assert_same(together(engine), alone(dtype))
    assert engine.stats().host_pages_restored_total > 10


@pytest.mark.parametrize("dtype", NARROW)
def test_prompts_in_pieces_give_the_same_tokens(dtype: KVDtype) -> None:
    assert_same(together(engine_of(dtype, max_num_batched_tokens=24)), alone(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_first_tokens_are_about_as_likely_as_with_float_pages(dtype: KVDtype) -> None:
    errors = [
        abs(x - y)
        for mine, other in zip(alone(dtype), alone("auto"), strict=True)
        for (_, x), (_, y) in zip(likeliest(mine), likeliest(other), strict=True)
    ]
    assert 0 < np.median(errors) < FORMAT_ERROR[dtype]


def likeliest(outputs: list[RequestOutput]) -> list[tuple[int, float]]:
    """Of a request's first token."""
    logprobs = outputs[0].logprobs
    assert logprobs is not None
    return list(logprobs[0].top)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_ledger_tells_the_bytes_of_a_page(dtype: KVDtype) -> None:
    # 2 layers, keys and values of 2 heads, 8 tokens: 16 numbers and a scale of 2 bytes each.
    assert engine_of(dtype).page_ledger().page_bytes == 2 * 2 * 2 * 8 * (16 // (2 if dtype == "int4" else 1) + 2)
