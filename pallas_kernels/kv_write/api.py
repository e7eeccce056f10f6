"""The contract of a KV write; the XLA scatter serves every device until a kernel beats it."""

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
    return kv_pages.at[page_ids, :, offsets].set(kv, mode="promise_in_bounds")
