"""Builds the native attention prototype and puts it in the place of the XLA path, in this process alone.

Needs g++ and an x86 CPU with AVX-512 or a compiler that lowers 64-byte vectors. Not part of the package: it answers the
question what a native kernel would be worth (see benchmarks/step.md).
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import xla

COMPILE = ("g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")  # jaxlib's headers warn
SOURCE = Path(__file__).with_name("attention.cc")


def install() -> None:
    """From here on, every program traced in this process calls the native kernel."""
    library = Path(tempfile.mkdtemp(prefix="native-attention-")) / "attention.so"
    subprocess.run(
        [*COMPILE, f"-I{jax.ffi.include_dir()}", "-o", str(library), str(SOURCE)],
        check=True,
    )
    handler = ctypes.cdll.LoadLibrary(str(library)).paged_attention
    jax.ffi.register_ffi_target("native_paged_attention", jax.ffi.pycapsule(handler), platform="cpu")
    xla.paged_attention = paged_attention  # type: ignore[assignment]


def paged_attention(
    q: Array,
    kv: KVPages,
    block_tables: Array,
    tables: Array,
    starts: Array,
    lengths: Array,
    *,
    scale: float,
    **unsupported: Any,
) -> Array:
    """As `xla.paged_attention`, without windows, caps and sinks."""
    assert kv.dtype == "float32", kv.dtype
    assert all(value is None for value in unsupported.values()), unsupported
    call = jax.ffi.ffi_call("native_paged_attention", jax.ShapeDtypeStruct(q.shape, np.float32))
    out: Array = call(q, kv.data, block_tables, tables, starts, lengths, scale=np.float32(scale))
    return out
