"""The contract of a KV write; the XLA scatter serves every device until a kernel beats it."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.bits import from_bits, to_bits


def write_kv(kv_pages: Array, k: Array, v: Array, page_ids: Array, offsets: Array) -> Array:
    """Writes this step's keys and values into their pages.

    Args:
      kv_pages: [pages, kv_heads, page_size, 2 * head_dim]; updated in place where the caller donates it.
      k, v: [tokens, kv_heads, head_dim], cast to the pages' dtype.
      page_ids, offsets: int32[tokens], in bounds. Padding tokens point into page 0, which nothing reads.
    """
    kv = to_bits(jnp.concatenate([k, v], axis=-1).astype(kv_pages.dtype))
    written = to_bits(kv_pages).at[page_ids, :, offsets].set(kv, mode="promise_in_bounds")
    return from_bits(written, kv_pages.dtype)
