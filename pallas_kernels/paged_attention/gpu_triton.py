"""Paged attention in Pallas for Triton, on Ampere and Ada. Apart from `gpu_mosaic`, as JAX is retiring this backend.

The division of work is that of `gpu_mosaic`: a program takes one piece of a row, one KV head and a tile of its queries.
A block's keys are gathered through the block table key by key, so pages may have any size. Triton arranges copies ahead
of time by itself (num_stages), and needs the sizes of arrays to be powers of two.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.kv_dtype import KVDtype, is_quantized
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import codes, splits, tuning
from pallas_kernels.paged_attention.shape import AttentionShape
from pallas_kernels.paged_attention.splits import MASKED, Piece

LOG2_E = math.log2(math.e)
Ref = Any  # jax gives the types of references no public name


def unsupported(shape: AttentionShape) -> str | None:
    """Why this kernel cannot serve the shape, or None."""
    if shape.platform == "gpu" and shape.compute_capability < 8:
        return f"compute capability {shape.compute_capability} has no asynchronous copies; Ampere (8.0) and later do"
    if shape.head_dim not in (16, 32, 64, 128, 256):
        return f"head_dim {shape.head_dim} is not a power of two from 16 to 256"
    return None


def _attend(
    q_ref: Ref,
    kv_ref: Ref,
    scales_ref: Ref,  # None where the format has no scales
    tables_ref: Ref,
    pieces_ref: Ref,
    out_ref: Ref,
    log_sums_ref: Ref,
    *,
    kv_dtype: KVDtype,
    blocks: tuning.TritonBlocks,
    group: int,
    queries: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """One program. q: [rows, kv_heads, query rows, head_dim]; the rest as in `paged_attention` and `splits`."""
    page_size, head_dim = kv_ref.shape[2], q_ref.shape[3]
    value_column = 0 if kv_dtype == "int4" else head_dim  # there a byte holds both
    piece_index, kv_head = pl.program_id(0), pl.program_id(1)
    piece = Piece(*(pieces_ref[piece_index, i] for i in range(len(Piece._fields))))
    first_visible = jnp.int32(0) if sliding_window is None else jnp.maximum(0, piece.start - sliding_window + 1)

    def product(a: Array, b: Array, contracted: int) -> Array:
        """a times b over axis `contracted` of b; float32 is not rounded to fewer bits first."""
        precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
        axes = (((1,), (contracted,)), ((), ()))
        return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)

    query_row = pl.program_id(2) * blocks.rows + jnp.arange(blocks.rows)
    is_row = (query_row < q_ref.shape[2])[:, None]
    column = jnp.arange(head_dim)
    own_rows = (query_row[:, None], column[None, :])
    q = plgpu.load(q_ref.at[(piece.row, kv_head, *own_rows)], mask=is_row, other=0.0)
    position = (piece.start + query_row // group)[:, None]

    def step(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        row_max, row_sum, values = state
        key = block * blocks.keys + jnp.arange(blocks.keys)
        usable = (key >= first_visible) & (key < piece.length)
        pages = plgpu.load(tables_ref.at[piece.table, key // page_size], mask=usable, other=0)
        at = (pages[:, None], kv_head, (key % page_size)[:, None])
        k = plgpu.load(kv_ref.at[(*at, column[None, :])], mask=usable[:, None], other=0)
        v = plgpu.load(kv_ref.at[(*at, value_column + column[None, :])], mask=usable[:, None], other=0)
        if is_quantized(kv_dtype):
            k = codes.numbers(k, kv_dtype, of_values=False).astype(q.dtype)
            v = codes.numbers(v, kv_dtype, of_values=True).astype(q.dtype)

        def token_scales(half: int) -> Array:
            at = (pages, kv_head, half, key % page_size)
            return codes.scales(plgpu.load(scales_ref.at[at], mask=usable, other=0))

        scores = product(q, k, 1)
        if is_quantized(kv_dtype):
            scores *= token_scales(0)[None, :]
        if soft_cap is None:
            scores *= scale * LOG2_E
        else:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
            scores = 1 - 2 / (1 + jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap)))
            scores *= soft_cap * LOG2_E
        seen = usable[None, :] & (key[None, :] <= position)
        if sliding_window is not None:
            seen &= key[None, :] > position - sliding_window
        scores = jnp.where(seen, scores, MASKED)

        new_max = jnp.maximum(row_max, scores.max(axis=1))
        kept = jnp.exp2(row_max - new_max)
        weights = jnp.exp2(scores - new_max[:, None])
        row_sum = row_sum * kept + weights.sum(axis=1)
        if is_quantized(kv_dtype):
            weights *= token_scales(1)[None, :]
        values = values * kept[:, None] + product(weights.astype(v.dtype), v, 0)
        return new_max, row_sum, values

    @pl.when(piece.first_block < piece.end_block)
    def _() -> None:
        state = (
            jnp.full((blocks.rows,), MASKED, jnp.float32),
            jnp.zeros((blocks.rows,), jnp.float32),
            jnp.zeros((blocks.rows, head_dim), jnp.float32),
        )
        row_max, row_sum, values = lax.fori_loop(piece.first_block, piece.end_block, step, state)
        plgpu.store(out_ref.at[(piece_index, kv_head, *own_rows)], values / row_sum[:, None], mask=is_row)
        log_sums = row_max * (1 / LOG2_E) + jnp.log(row_sum)
        plgpu.store(log_sums_ref.at[piece_index, kv_head, query_row], log_sums, mask=is_row[:, 0])


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
    interpret: bool,
) -> Array:
    """See `api.paged_attention`; `tables`, `starts` and `lengths` are the fields of `AttentionRows`."""
    num_rows, queries, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = kv.data.shape
    dtype = q.dtype if is_quantized(kv.dtype) else kv.data.dtype  # of products
    group = num_heads // kv_heads
    blocks = tuning.triton_blocks(query_rows=queries * group, head_dim=head_dim, itemsize=dtype.itemsize)
    tiles = -(-queries * group // blocks.rows)
    pieces = splits.cut(
        tables,
        starts,
        lengths,
        block_keys=blocks.keys,
        blocks_per_table=-(-block_tables.shape[1] * page_size // blocks.keys),
        sliding_window=sliding_window,
        pieces_wanted=tuning.gpu_pieces_wanted(kv_heads * tiles),
        least_blocks=max(1, tuning.LEAST_PIECE_KEYS // blocks.keys),
    )
    out_shape = (pieces.rows.shape[0], kv_heads, queries * group, head_dim)
    values_type = jax.ShapeDtypeStruct(out_shape, jnp.float32)
    values, log_sums = pl.pallas_call(
        functools.partial(
            _attend,
            kv_dtype=kv.dtype,
            blocks=blocks,
            group=group,
            queries=queries,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        ),
        out_shape=(values_type, jax.ShapeDtypeStruct(out_shape[:3], jnp.float32)),
        grid=(out_shape[0], kv_heads, tiles),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        cost_estimate=splits.cost(q, kv, block_tables, values_type, sliding_window=sliding_window),
        name="paged_attention_triton",
    )(splits.stack_heads(q, kv_heads).astype(dtype), kv.data, kv.scales, block_tables, pieces.fields)
    return splits.unstack_heads(splits.merge(values, log_sums, pieces, num_rows, sinks), queries).astype(q.dtype)
