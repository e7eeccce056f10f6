"""Step times from a data sheet, against numbers worked out by hand for the tiny model."""

import pytest
from tiny_engine import TINY_MODEL, TinyOptions, tiny_config

from jaxserve.simulation.simulator import simulate
from jaxserve.simulation.step_estimate import estimate_step_times
from jaxserve.simulation.step_times import PageCopyTime
from jaxserve.simulation.traces import TracedRequest
from pallas_kernels.kv_dtype import KVDtype

# Of the tiny model, a layer: q, k, v, o: 64·32 + 2·32·32 + 32·64; the MLP: 3·48·32; two norms of 32. Then a norm.
BODY = 2 * (64 * 32 + 2 * 32 * 32 + 32 * 64 + 3 * 48 * 32 + 2 * 32) + 32
HEAD = 160 * 32
KEY_BYTES = 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, dimensions, float32
QUERY_KEY_FLOPS = 4 * 4 * 16 * 2


def test_a_slow_memory_makes_a_step_take_the_time_of_its_bytes() -> None:
    times = estimate_step_times(tiny_config(TinyOptions()), TINY_MODEL, bytes_per_s=1e6, flops_per_s=1e18)
    assert times.source == "estimate"
    for rows, blocks, keys in [(2, 0, 2), (8, 0, 8 * 192), (8, 4, 12 * 48)]:
        assert times.estimate(rows, blocks, keys) == pytest.approx(((BODY + HEAD) * 4 + keys * KEY_BYTES) / 1e6)


@pytest.mark.parametrize(("dtype", "key_bytes"), [("int8", 2 * 2 * 2 * (16 + 2)), ("int4", 2 * 2 * 2 * (8 + 2))])
def test_narrow_pages_are_read_in_the_time_of_their_own_bytes(dtype: KVDtype, key_bytes: int) -> None:
    config = tiny_config(TinyOptions(cache_dtype=dtype))
    times = estimate_step_times(config, TINY_MODEL, bytes_per_s=1e6, flops_per_s=1e18)
    assert times.estimate(8, 0, 8 * 192) == pytest.approx(((BODY + HEAD) * 4 + 8 * 192 * key_bytes) / 1e6)


def test_slow_arithmetic_makes_a_step_take_the_time_of_its_flops() -> None:
    times = estimate_step_times(tiny_config(TinyOptions()), TINY_MODEL, bytes_per_s=1e18, flops_per_s=1e6)
    decode = 2 * BODY * 8 + 2 * HEAD * 8 + QUERY_KEY_FLOPS * 8 * 192
    mixed = 2 * BODY * (8 + 4 * 16) + 2 * HEAD * 8 + QUERY_KEY_FLOPS * (8 * 48 + 4 * 48 * 16)
    assert times.estimate(8, 0, 8 * 192) == pytest.approx(decode / 1e6)
    assert times.estimate(8, 4, 12 * 48) == pytest.approx(mixed / 1e6)


def test_a_trace_can_be_simulated_on_an_estimate() -> None:
    config = tiny_config(TinyOptions())
    times = estimate_step_times(config, TINY_MODEL, bytes_per_s=1e9, flops_per_s=1e12)
    report = simulate(config, times, [TracedRequest(arrival_s=0.0, prompt_tokens=20, output_tokens=5)])
    assert report.duration_s >= 5 * (BODY + HEAD) * 4 / 1e9


def test_a_page_crosses_the_bus_at_its_peak() -> None:
    config = tiny_config(TinyOptions(host_pages=4))
    times = estimate_step_times(config, TINY_MODEL, bytes_per_s=1e9, flops_per_s=1e12, bus_bytes_per_s=1e6)
    page_bytes = 2 * 8 * 2 * 2 * 16 * 4  # keys and values, tokens, layers, KV heads, their width, float32
    assert times.page_copy == PageCopyTime(save_seconds=page_bytes / 1e6, restore_seconds=page_bytes / 1e6)
    config = tiny_config(TinyOptions())
    assert estimate_step_times(config, TINY_MODEL, bytes_per_s=1e9, flops_per_s=1e12).page_copy is None
