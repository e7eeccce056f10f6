"""The contract of a KV write; the XLA scatter serves every device until a kernel beats it."""

from jax import Array


def write_kv(pages: Array, values: Array, page_ids: Array, offsets: Array) -> Array:
    """Writes this step's keys (or values) into their pages.

    Args:
      pages: [pages, kv_heads, page_size, head_dim]; updated in place where the caller donates it.
      values: [tokens, kv_heads, head_dim], the pages' dtype.
      page_ids, offsets: int32[tokens], in bounds. Padding tokens point into page 0, which nothing reads.
    """
    return pages.at[page_ids, :, offsets].set(values, mode="promise_in_bounds")
