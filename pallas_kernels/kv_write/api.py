"""Writing a step's keys and values into their pages by what XLA does in place on each device (benchmarks/aot.md)."""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kv_format import KVPages, pack, quantize
from pallas_kernels.kv_write.narrow_tpu import write_tiles
from pallas_kernels.paged_attention import XLA, Backend, BackendName


def write_kv(kv: KVPages, k: Array, v: Array, page_ids: Array, offsets: Array, *, backend: Backend = XLA) -> KVPages:
    """Writes this step's keys and values into their pages.

    Args:
      kv: updated in place where the caller donates it.
      k, v: [tokens, kv_heads, head_dim], cast or quantized to the pages' format.
      page_ids, offsets: int32[tokens], in bounds. Padding tokens point into page 0, which nothing reads.
      backend: who computes attention. On TPU its kernel has one beside it for narrow pages.
    """
    # On the CPU a bfloat16 pool is copied here by jax 0.10 (not by 0.12); as integers (pallas_kernels.bits) by both.
    # Every index is named: with a slice for the heads, XLA on TPU turns the whole pool, scatters, and turns it back.
    heads = jnp.arange(k.shape[1])
    if kv.scales is None:
        lines = jnp.concatenate([k, v], axis=-1).astype(kv.data.dtype)
        data = kv.data.at[page_ids[:, None], heads, offsets[:, None]].set(lines, mode="promise_in_bounds")
        return replace(kv, data=data)
    (k, k_scales), (v, v_scales) = quantize(k, kv.dtype), quantize(v, kv.dtype)
    lines, line_scales = pack(k, v, kv.dtype), jnp.stack([k_scales, v_scales], axis=-1)
    kernel = kernel_module(backend.name)
    if kernel is not None:
        data, scales = kernel.write_narrow(
            kv.data, kv.scales, lines, line_scales, page_ids, offsets, interpret=backend.interpret
        )
        return replace(kv, data=data, scales=scales)
    data, scales = lax.platform_dependent(
        kv.data, kv.scales, lines, line_scales, page_ids, offsets, tpu=write_tiles, default=_scatter
    )
    return replace(kv, data=data, scales=scales)


def kernel_module(name: BackendName) -> ModuleType | None:
    """The kernel that writes narrow pages beside this attention; imported on its first use, as that is."""
    return import_module("pallas_kernels.kv_write.tpu") if name == "tpu" else None


def _scatter(
    data: Array, scales: Array, lines: Array, line_scales: Array, page_ids: Array, offsets: Array
) -> tuple[Array, Array]:
    heads, halves = jnp.arange(lines.shape[1]), jnp.arange(2)
    page_ids, offsets = page_ids[:, None], offsets[:, None]
    data = data.at[page_ids, heads, offsets].set(lines, mode="promise_in_bounds")
    scales = scales.at[page_ids[..., None], heads[:, None], halves, offsets[..., None]].set(
        line_scales, mode="promise_in_bounds"
    )
    return data, scales
