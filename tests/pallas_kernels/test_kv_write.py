"""Writing keys and values into pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_dtype import KVDtype, token_bytes
from pallas_kernels.kv_format import KVPages
from pallas_kernels.kv_write import write_kv

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


def test_any_number_of_padding_tokens_touches_the_dummy_page_alone() -> None:
    before = jnp.ones(SHAPE)
    k, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 20, 2, 16)), jnp.float32)
    nowhere = np.zeros(20, np.int32)
    after = np.asarray(write_kv(KVPages(data=before, scales=None, dtype="float32"), k, v, nowhere, nowhere).data)
    np.testing.assert_array_equal(after[1:], 1.0)
    np.testing.assert_array_equal(after[0, :, 1:], 1.0)
    assert np.isfinite(after[0]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
def test_a_donated_pool_is_updated_in_place(dtype: KVDtype) -> None:
    num_pages, kv_heads, page_size, width = SHAPE
    pages = KVPages.shapes(num_pages, kv_heads, page_size, width // 2, dtype)
    values = jax.ShapeDtypeStruct((4, 2, 16), jnp.float32)
    indices = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(pages, values, values, indices, indices).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == num_pages * page_size * token_bytes(kv_heads, width // 2, dtype)
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes, "the pool is copied"
