"""Paged attention on the CPU: `cpu.c` as an XLA custom call, compiled on its first use (docs/kernels.md)."""

from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.kv_format import KVPages
from pallas_kernels.native import HEADERS, CustomCall
from pallas_kernels.paged_attention.shape import AttentionShape

SOURCES = [
    *(Path(__file__).with_name(name) for name in ("cpu.c", "cpu_vectors.h", "cpu_check.h")),
    *HEADERS,
]
FORMATS: tuple[KVDtype, ...] = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")  # as in C
assert set(FORMATS) == set(get_args(KVDtype))
MOST_DIFFERENCE = 2e-5  # of the self-check, whose answers are of the order of 1
NO_WINDOW = np.iinfo(np.int32).max

_CALL = CustomCall("paged_attention", SOURCES, most_difference=MOST_DIFFERENCE, contracts=True)
prepare = _CALL.prepare


def unsupported(shape: AttentionShape) -> str | None:
    """Why this backend cannot serve the shape; None where it can."""
    return None if shape.platform == "cpu" else f"it is for CPUs, and the device is a {shape.platform}"


def paged_attention(
    q: Array,
    kv: KVPages,
    block_tables: Array,
    tables: Array,
    starts: Array,
    lengths: Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
) -> Array:
    """See `api.paged_attention`; `tables`, `starts` and `lengths` are the fields of `AttentionRows`."""
    call = jax.ffi.ffi_call(_CALL.target, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    out: Array = call(
        q.astype(jnp.float32),
        kv.data,
        jnp.zeros(0, jnp.int16) if kv.scales is None else kv.scales,
        block_tables,
        tables,
        starts,
        lengths,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        format=np.int32(FORMATS.index(kv.dtype)),
        scale=np.float32(scale),
        soft_cap=np.float32(0 if soft_cap is None else soft_cap),
        window=np.int32(NO_WINDOW if sliding_window is None else sliding_window),
    )
    return out.astype(q.dtype)
