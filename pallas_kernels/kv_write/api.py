"""Writing a step's keys and values into their pages: XLA's scatter, on every device (benchmarks/aot.md)."""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_format import KVPages, pack, quantize


def write_kv(kv: KVPages, k: Array, v: Array, page_ids: Array, offsets: Array) -> KVPages:
    """Writes this step's keys and values into their pages.

    Args:
      kv: updated in place where the caller donates it.
      k, v: [tokens, kv_heads, head_dim], cast or quantized to the pages' format.
      page_ids, offsets: int32[tokens], in bounds. Padding tokens point into page 0, which nothing reads.
    """
    # On the CPU a bfloat16 pool is copied here by jax 0.10 (not by 0.12); as integers (pallas_kernels.bits) by both.
    # Every index is named: with a slice for the heads, XLA on TPU turns the whole pool, scatters, and turns it back.
    heads = jnp.arange(k.shape[1])
    page_ids, offsets = page_ids[:, None], offsets[:, None]
    if kv.scales is None:
        lines = jnp.concatenate([k, v], axis=-1).astype(kv.data.dtype)
        return replace(kv, data=kv.data.at[page_ids, heads, offsets].set(lines, mode="promise_in_bounds"))
    (k, k_scales), (v, v_scales) = quantize(k, kv.dtype), quantize(v, kv.dtype)
    data = kv.data.at[page_ids, heads, offsets].set(pack(k, v, kv.dtype), mode="promise_in_bounds")
    halves = jnp.arange(2)
    scales = kv.scales.at[page_ids[..., None], heads[:, None], halves, offsets[..., None]].set(
        jnp.stack([k_scales, v_scales], axis=-1), mode="promise_in_bounds"
    )
    return replace(kv, data=data, scales=scales)
