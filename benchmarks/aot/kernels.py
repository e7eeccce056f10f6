"""The kernels' shapes that are compiled for every target, and the least bytes that each must move."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_dtype import KVDtype, is_quantized, token_bytes
from pallas_kernels.kv_format import KVPages
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import AttentionRows, Backend, paged_attention
from pallas_kernels.paged_attention.shape import AttentionShape
from pallas_kernels.quantized_matmul import gpu_triton


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One call of paged attention in which every sequence is `keys` long; the defaults are Llama-3-8B's, decoding."""

    name: str
    rows: int = 64
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    keys: int = 4096
    num_pages: int = 64 * 256 + 1
    dtype: KVDtype = "bfloat16"
    kv_dtype: KVDtype | None = None  # None: the queries'
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def kernel(self) -> str:
        """What the kernel is called in the compilers' dumps."""
        return "paged_attention"

    @property
    def least_bytes(self) -> int:
        """Every visible key and value once for each row, or the whole pool; the queries once, the output once."""
        seen = self.keys if self.sliding_window is None else min(self.keys, self.sliding_window + self.queries - 1)
        tokens = min(self.rows * seen, self.num_pages * self.page_size)
        queries = self.rows * self.queries * self.heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return tokens * token_bytes(self.kv_heads, self.head_dim, self.kv_dtype or self.dtype) + 2 * queries

    def shape(self, platform: str, compute_capability: float) -> AttentionShape:
        return AttentionShape(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            block_q=max(64, self.queries),
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            platform=platform,
            compute_capability=compute_capability,
        )

    def arguments(self) -> tuple[Any, ...]:
        """q, pages, block_tables, rows, sinks as shapes."""
        row = jax.ShapeDtypeStruct((self.rows,), jnp.int32)
        return (
            jax.ShapeDtypeStruct((self.rows, self.queries, self.heads, self.head_dim), self.dtype),
            KVPages.shapes(self.num_pages, self.kv_heads, self.page_size, self.head_dim, self.kv_dtype or self.dtype),
            jax.ShapeDtypeStruct((self.rows, -(-self.keys // self.page_size)), jnp.int32),
            AttentionRows(tables=row, starts=row, lengths=row),
            jax.ShapeDtypeStruct((self.heads,), jnp.float32) if self.has_sinks else None,
        )

    def function(self, backend: Backend) -> Callable[..., Array]:
        def attend(q: Array, kv: KVPages, block_tables: Array, rows: AttentionRows, sinks: Array | None) -> Array:
            return paged_attention(
                q,
                kv,
                block_tables,
                rows,
                scale=self.head_dim**-0.5,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                sinks=sinks,
                backend=backend,
            )

        return attend


NARROW: tuple[KVDtype, ...] = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")

ATTENTION = (
    AttentionCall(name="decode 64 × 4k"),
    AttentionCall(name="decode 64 × 4k, pages of 64", page_size=64, num_pages=64 * 64 + 1),
    AttentionCall(name="decode 64 × 4k, one head of 8 (tensor 8)", heads=4, kv_heads=1, page_size=64, num_pages=4097),
    AttentionCall(name="decode 256 × 128k", rows=256, keys=128 * 1024),
    AttentionCall(name="prefill 16 blocks of 64 at 4k", rows=16, queries=64),
    AttentionCall(name="decode, head_dim 64 (SmolLM2)", heads=9, kv_heads=3, head_dim=64),
    AttentionCall(name="prefill, head_dim 64 (SmolLM2)", rows=16, queries=64, heads=9, kv_heads=3, head_dim=64),
    AttentionCall(
        name="decode, head_dim 256, soft cap, window (Gemma 2)",
        heads=8,
        kv_heads=4,
        head_dim=256,
        soft_cap=50.0,
        sliding_window=4096,
    ),
    AttentionCall(
        name="prefill, head_dim 256, soft cap, window (Gemma 2)",
        rows=16,
        queries=64,
        heads=8,
        kv_heads=4,
        head_dim=256,
        soft_cap=50.0,
        sliding_window=4096,
    ),
    AttentionCall(
        name="decode, sinks, window 128 (gpt-oss)", heads=64, head_dim=64, has_sinks=True, sliding_window=128
    ),
    AttentionCall(
        name="prefill, sinks, window 128 (gpt-oss)",
        rows=16,
        queries=64,
        heads=64,
        head_dim=64,
        has_sinks=True,
        sliding_window=128,
    ),
    AttentionCall(name="decode, as many KV heads (MHA)", kv_heads=32),
    AttentionCall(name="prefill, as many KV heads (MHA)", rows=16, queries=64, kv_heads=32, num_pages=4097),
    AttentionCall(name="decode 64 × 4k, float32", dtype="float32"),
    AttentionCall(name="prefill, float32", rows=16, queries=64, dtype="float32", num_pages=4097),
    AttentionCall(name="decode 64 × 4k, float16", dtype="float16"),
    *(
        AttentionCall(name=f"decode 64 × 4k, {kv_dtype} pages of 128", kv_dtype=kv_dtype, page_size=128, num_pages=2049)
        for kv_dtype in NARROW
    ),
    *(
        AttentionCall(
            name=f"prefill 16 blocks of 64 at 4k, {kv_dtype} pages of 128",
            rows=16,
            queries=64,
            kv_dtype=kv_dtype,
            page_size=128,
            num_pages=2049,
        )
        for kv_dtype in NARROW
    ),
    AttentionCall(
        name="decode, head_dim 64 (SmolLM2), int8 pages of 128",
        heads=9,
        kv_heads=3,
        head_dim=64,
        kv_dtype="int8",
        page_size=128,
        num_pages=2049,
    ),
)

WITH_XLA = ("decode 64 × 4k", "prefill 16 blocks of 64 at 4k")  # compiled with plain XLA too, to compare


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteCall:
    """One write of a step's keys and values into Llama-3-8B's pages."""

    name: str
    tokens: int
    num_pages: int = 64 * 256 + 1
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    kv_dtype: KVDtype = "bfloat16"

    @property
    def has_kernel(self) -> bool:
        """Whether a TPU writes it by a kernel of ours."""
        return is_quantized(self.kv_dtype)

    @property
    def kernel(self) -> str:
        return "kv_write"

    @property
    def least_bytes(self) -> int:
        values = self.tokens * self.kv_heads * 2 * self.head_dim * 2  # read once, written once
        return values + self.tokens * token_bytes(self.kv_heads, self.head_dim, self.kv_dtype)

    def arguments(self) -> tuple[Any, ...]:
        values = jax.ShapeDtypeStruct((self.tokens, self.kv_heads, self.head_dim), jnp.bfloat16)
        index = jax.ShapeDtypeStruct((self.tokens,), jnp.int32)
        pages = KVPages.shapes(self.num_pages, self.kv_heads, self.page_size, self.head_dim, self.kv_dtype)
        return pages, values, values, index, index

    def function(self, backend: Backend) -> Callable[..., KVPages]:
        return partial(write_kv, backend=backend)


WRITES = (
    WriteCall(name="write 64 tokens", tokens=64),
    WriteCall(name="write 64 + 512 tokens", tokens=576),
    WriteCall(name="write 64 tokens, int8 pages of 128", tokens=64, kv_dtype="int8", page_size=128, num_pages=2049),
    WriteCall(
        name="write 64 + 512 tokens, int8 pages of 128", tokens=576, kv_dtype="int8", page_size=128, num_pages=2049
    ),
    WriteCall(name="write 64 tokens, int4 pages of 128", tokens=64, kv_dtype="int4", page_size=128, num_pages=2049),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulCall:
    """One product with a 4-bit matrix and its zero points; the default is Llama-3-8B's way into the MLP."""

    name: str
    tokens: int
    outputs: int = 14336
    inputs: int = 4096
    group: int = 32

    @property
    def kernel(self) -> str:
        return "quantized_matmul"

    @property
    def least_bytes(self) -> int:
        """Codes, scales and zero points once; the tokens, once in and once out."""
        matrix = self.outputs * self.inputs // 2 + 2 * 2 * self.outputs * (self.inputs // self.group)
        return matrix + 2 * self.tokens * (self.inputs + self.outputs)

    def arguments(self) -> tuple[Any, ...]:
        by_group = jax.ShapeDtypeStruct((self.outputs, self.inputs // self.group), jnp.bfloat16)
        codes = jax.ShapeDtypeStruct((self.outputs, self.inputs), jnp.int4)
        return jax.ShapeDtypeStruct((self.tokens, self.inputs), jnp.bfloat16), codes, by_group, by_group

    def function(self, backend: Backend) -> Callable[..., Array]:
        return partial(gpu_triton.quantized_matmul, interpret=False)


MATMULS = (  # of a GPU
    MatmulCall(name="4-bit matrix 14336 × 4096, 8 tokens", tokens=8),
    MatmulCall(name="4-bit matrix 14336 × 4096, 64 tokens", tokens=64),
    MatmulCall(name="4-bit matrix 14336 × 4096, 256 tokens", tokens=256),
    MatmulCall(
        name="4-bit matrix 4096 × 14336, groups of 128, 64 tokens", tokens=64, outputs=4096, inputs=14336, group=128
    ),
)
