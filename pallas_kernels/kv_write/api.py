"""Writing a step's keys and values into their pages: XLA's scatter, on every device (benchmarks/aot.md)."""

import jax.numpy as jnp
from jax import Array


def write_kv(kv_pages: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    """Writes this step's keys and values into their pages.

    Args:
      kv_pages: [pages, kv_heads, page_size, 2 * head_dim]; updated in place where the caller donates it.
      k, v: [tokens, kv_heads, head_dim], cast to the pages' dtype.
      page_ids, offsets: int32[tokens], in bounds. Padding tokens point into page 0, which nothing reads.
    """
    # On the CPU a bfloat16 pool is copied here by jax 0.10 (not by 0.12); as integers (pallas_kernels.bits) by both.
    kv = jnp.concatenate([k, v], axis=-1).astype(kv_pages.dtype)
    # Every index is named: with a slice for the heads, XLA on TPU turns the whole pool, scatters, and turns it back.
    heads = jnp.arange(kv.shape[1])
    return kv_pages.at[page_ids[:, None], heads, offsets[:, None]].set(kv, mode="promise_in_bounds")
