"""What a configuration takes of a machine, told from its compiled programs; the machine here is the CPU."""

import jax
import pytest
from tiny_engine import TINY_MODEL, TinyOptions, tiny_config

from jaxserve.aot.fit import Fit, measure_fit
from jaxserve.errors import ConfigError

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PAGE_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # layers, keys and values, KV heads, page, head_dim, float32
WEIGHTS = 160 * 32 * 2 + 32 + 2 * (2 * 32 + 32 * 16 * (4 + 2 + 2 + 4) + 3 * 32 * 48)
STATE = 9 * (160 * (4 + 4 + 1) + 4 + 32 * 4)  # slots: bias, counts, in_prompt; the last token; the pooled hidden state


@pytest.fixture(scope="module")
def fit() -> Fit:
    config = tiny_config(TinyOptions())
    return measure_fit(config, TINY_MODEL, jax.devices(), usable_bytes=2**22, only_largest=True)


def test_the_largest_steps_decide(fit: Fit) -> None:
    assert [(p.shape.decode_rows, p.shape.prefill_blocks) for p in fit.programs] == [(8, 0), (8, 4)]


def test_arguments_are_weights_pages_rows_and_the_packed_batch(fit: Fit) -> None:
    assert fit.weight_bytes == 4 * WEIGHTS
    assert fit.page_bytes == PAGE_BYTES
    assert fit.state_bytes == STATE
    known = fit.weight_bytes + fit.num_pages * PAGE_BYTES + fit.state_bytes
    for program in fit.programs:
        assert 0 < program.argument_bytes - known < 4096
        assert 0 < program.temporary_bytes < 2**20
        assert program.collectives == ()


def test_pages_of_4_bits_are_counted_with_their_scales() -> None:
    config = tiny_config(TinyOptions(cache_dtype="int4"))
    fit = measure_fit(config, TINY_MODEL, jax.devices(), usable_bytes=2**22, only_largest=True)
    assert fit.page_bytes == 2 * 2 * 2 * 8 * (16 // 2 + 2)
    assert all(program.refusal is None for program in fit.programs)
    assert all(program.temporary_bytes < 2**20 for program in fit.programs)


def test_it_fits_as_long_as_arguments_and_temporaries_do(fit: Fit) -> None:
    assert fit.fits
    largest = max(p.temporary_bytes for p in fit.programs)
    left = 2**22 - fit.weight_bytes - fit.state_bytes - largest
    assert fit.most_pages == left // PAGE_BYTES > fit.num_pages
    small = measure_fit(fit.config, TINY_MODEL, jax.devices(), usable_bytes=950_000, only_largest=True)
    assert not small.fits
    assert small.most_pages < small.num_pages


def test_requests_at_once_are_limited_by_pages_or_slots(fit: Fit) -> None:
    assert fit.num_tokens == 8 * 24 * 8
    assert fit.concurrency(192) == 8
    assert fit.concurrency(193) == 7  # 25 pages each
    assert fit.concurrency(1) == 8


def test_more_devices_than_the_machine_has_are_refused() -> None:
    config = tiny_config(TinyOptions())
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"tensor": 2})})
    with pytest.raises(ConfigError, match=r"mesh\.tensor is 2; here is only 1 device"):
        measure_fit(config, TINY_MODEL, jax.devices(), usable_bytes=2**30)
