"""Writing keys and values into pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the verdict has no public name
from jax.experimental.pallas import tpu as pltpu
from kv_format_reference import NARROW, quantized

from pallas_kernels.kv_dtype import KVDtype, token_bytes
from pallas_kernels.kv_format import KVPages
from pallas_kernels.kv_write import tpu, write_kv
from pallas_kernels.kv_write.narrow_tpu import write_tiles

LAZY = pltpu.InterpretParams()  # a copy arrives when it is waited for: without the wait, NaN
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)
SHAPE = (6, 2, 8, 32)  # pages, kv_heads, page_size, 2 * head_dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_token_lands_in_its_place_and_nothing_else_changes(dtype: KVDtype) -> None:
    rng = np.random.default_rng(0)
    before = jnp.asarray(rng.standard_normal(SHAPE), dtype)
    k, v = jnp.asarray(rng.standard_normal((2, 5, 2, 16)), dtype)
    page_ids, offsets = np.array([3, 3, 5, 1, 3], np.int32), np.array([0, 7, 2, 2, 1], np.int32)
    after = np.asarray(write_kv(KVPages(data=before, scales=None, dtype=dtype), k, v, page_ids, offsets).data)
    expected = np.asarray(before).copy()
    for token in range(5):
        expected[page_ids[token], :, offsets[token], :16] = np.asarray(k)[token]
        expected[page_ids[token], :, offsets[token], 16:] = np.asarray(v)[token]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_codes_and_scales_land_in_their_places_whatever_was_there(dtype: KVDtype) -> None:
    rng = np.random.default_rng(0)
    shapes = KVPages.shapes(6, 2, 8, 16, dtype)
    assert shapes.scales is not None
    data = rng.integers(-128, 128, shapes.data.shape, np.int8)
    scales = rng.integers(-(2**15), 2**15, shapes.scales.shape, np.int16)  # a third of them no numbers
    k, v = (rng.standard_normal((2, 5, 2, 16)) * 10.0 ** rng.integers(-3, 4, (2, 5, 2, 1))).astype(np.float32)
    page_ids, offsets = np.array([3, 3, 5, 1, 3], np.int32), np.array([0, 7, 2, 2, 1], np.int32)
    before = KVPages(data=jnp.asarray(data), scales=jnp.asarray(scales), dtype=dtype)
    after = write_kv(before, jnp.asarray(k), jnp.asarray(v), page_ids, offsets)
    keys, values = quantized(k, dtype), quantized(v, dtype)
    for token, (page, offset) in enumerate(zip(page_ids, offsets, strict=True)):
        if dtype == "int4":
            data[page, :, offset] = (keys.codes[token] & 15) | (values.codes[token] << 4)
        else:
            data[page, :, offset] = np.concatenate([keys.codes[token], values.codes[token]], axis=-1)
        scales[page, :, 0, offset] = keys.scales[token]
        scales[page, :, 1, offset] = values.scales[token]
    np.testing.assert_array_equal(after.data, data)
    np.testing.assert_array_equal(np.asarray(after.scales), scales)


@pytest.mark.parametrize("page_size", [8, 64])
def test_tile_by_tile_as_on_tpu_all_lands_where_a_scatter_puts_it(page_size: int) -> None:
    rng = np.random.default_rng(2)
    data = rng.integers(-128, 128, (5, 2, page_size, 32), np.int8)
    scales = rng.integers(-(2**15), 2**15, (5, 2, 2, page_size), np.int16)
    lines, line_scales = rng.integers(-128, 128, (7, 2, 32), np.int8), rng.integers(-99, 99, (7, 2, 2), np.int16)
    page_ids = np.array([1, 1, 4, 2, 1, 2, 0], np.int32)  # neighbours in one tile, out of order
    offsets = np.array([0, 1, page_size - 1, 3, page_size // 2, 2, 0], np.int32)
    new_data, new_scales = jax.jit(write_tiles)(data, scales, lines, line_scales, page_ids, offsets)
    data[page_ids, :, offsets] = lines
    scales[page_ids, :, :, offsets] = line_scales
    np.testing.assert_array_equal(new_data, data)
    np.testing.assert_array_equal(new_scales, scales)


# The tokens of decode rows, a prompt's neighbours over the edge of a tile, and padding; alternating pages in between.
PAGE_IDS = np.array([3, 1, 0, 2, 2, 2, 2, 4, 1, 4, 1, 0, 0], np.int32)
OFFSETS = np.array([0, 127, 0, 30, 31, 32, 33, 5, 64, 6, 65, 0, 0], np.int32)


@pytest.mark.parametrize("simulator", [LAZY, EAGER], ids=["lazy", "eager, races are errors"])
@pytest.mark.parametrize("most_runs", [1, 3, 16])
def test_the_tpu_kernel_places_all_tokens_without_a_race(
    simulator: pltpu.InterpretParams, most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu, "MOST_RUNS", most_runs)
    monkeypatch.setattr(tpu, "CHUNK_TOKENS", 8)  # two programs, the second with fewer tokens
    rng = np.random.default_rng(2)
    data = rng.integers(-128, 128, (5, 2, 128, 256), np.int8)
    scales = rng.integers(-(2**15), 2**15, (5, 2, 2, 128), np.int16)
    lines = rng.integers(-128, 128, (13, 2, 256), np.int8)
    line_scales = rng.integers(-(2**15), 2**15, (13, 2, 2), np.int16)
    write = jax.jit(functools.partial(tpu.write_narrow, interpret=simulator))
    new_data, new_scales = write(data, scales, lines, line_scales, PAGE_IDS, OFFSETS)
    for token, (page, offset) in enumerate(zip(PAGE_IDS, OFFSETS, strict=True)):
        data[page, :, offset] = lines[token]
        scales[page, :, :, offset] = line_scales[token]
    np.testing.assert_array_equal(new_data, data)
    np.testing.assert_array_equal(new_scales, scales)
    assert simulator is LAZY or not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("dtype", NARROW)
def test_a_tokens_codes_depend_on_no_neighbour(dtype: KVDtype) -> None:
    """Padding, other heads and a broken token of the same step included: there is nothing that a maximum spans."""
    rng = np.random.default_rng(1)
    shapes = KVPages.shapes(3, 2, 8, 16, dtype)
    empty = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), shapes)
    k, v = rng.standard_normal((2, 4, 2, 16)).astype(np.float32)
    page_ids, offsets = np.array([1, 1, 0, 0], np.int32), np.array([0, 1, 0, 0], np.int32)
    alone = write_kv(empty, k[:1], v[:1], page_ids[:1], offsets[:1])
    k[1:], v[1:] = np.nan, 1e30
    k[0, 1] = v[0, 1] = np.inf
    beside = write_kv(empty, k, v, page_ids, offsets)
    np.testing.assert_array_equal(beside.data[1, 0, 0], alone.data[1, 0, 0])
    assert alone.scales is not None
    assert beside.scales is not None
    np.testing.assert_array_equal(beside.scales[1, 0, :, 0], alone.scales[1, 0, :, 0])


def test_any_number_of_padding_tokens_touches_the_dummy_page_alone() -> None:
    before = jnp.ones(SHAPE)
    k, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 20, 2, 16)), jnp.float32)
    nowhere = np.zeros(20, np.int32)
    after = np.asarray(write_kv(KVPages(data=before, scales=None, dtype="float32"), k, v, nowhere, nowhere).data)
    np.testing.assert_array_equal(after[1:], 1.0)
    np.testing.assert_array_equal(after[0, :, 1:], 1.0)
    assert np.isfinite(after[0]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", *NARROW])
def test_a_donated_pool_is_updated_in_place(dtype: KVDtype) -> None:
    num_pages, kv_heads, page_size, width = SHAPE
    pages = KVPages.shapes(num_pages, kv_heads, page_size, width // 2, dtype)
    values = jax.ShapeDtypeStruct((4, 2, 16), jnp.float32)
    indices = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(pages, values, values, indices, indices).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == num_pages * page_size * token_bytes(kv_heads, width // 2, dtype)
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes, "the pool is copied"
