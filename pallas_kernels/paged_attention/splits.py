"""What the GPU kernels share: rows cut into pieces by their actual lengths, heads stacked, pieces merged.

The work of a row is the blocks of keys that its queries may see. A GPU wants more independent pieces than it has places
to run them, of about equal size, so long rows are cut and short ones are not (Flash-Decoding, Dao et al. 2023):

    rows of 9, 0, 2 and 1 blocks, at most 4 blocks a piece  ->  row 0: 0..2, 3..5, 6..8   row 2: 0..1   row 3: 0..0

How many pieces there are is known on the device only; `num_pieces`, the static bound, is what the grid has.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.kv_dtype import token_bytes
from pallas_kernels.kv_format import KVPages

MASKED = -1e30  # finite, so that where all is masked there is no NaN


class Piece(NamedTuple):
    """A run of blocks of one row; int32 each. A piece past the last has no blocks."""

    row: Array
    table: Array
    start: Array
    length: Array
    first_block: Array
    end_block: Array  # one past the last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """The pieces that a step's rows are cut into.

    Attributes:
      fields: int32[pieces, 6], the fields of each `Piece`.
      rows: int32[pieces], the row of each piece; one past the last row for pieces that have no blocks.
    """

    fields: Array
    rows: Array


def cut(
    tables: Array,
    starts: Array,
    lengths: Array,
    *,
    block_keys: int,
    blocks_per_table: int,
    sliding_window: int | None,
    pieces_wanted: int,
    least_blocks: int,
) -> Pieces:
    """Cuts every row's visible blocks into pieces of nearly equal size.

    Args:
      block_keys: keys in a block.
      blocks_per_table: blocks that the longest possible row has.
      pieces_wanted: into how many pieces all rows together are cut, give or take one a row.
      least_blocks: of a piece, where the row has them: below, merging costs more than it gains.
    """
    num_rows = lengths.shape[0]
    first_visible = jnp.zeros_like(starts) if sliding_window is None else jnp.maximum(0, starts - sliding_window + 1)
    first = first_visible // block_keys
    blocks = jnp.where(lengths > 0, -(-lengths // block_keys) - first, 0)
    most_blocks = jnp.maximum(least_blocks, -(-blocks.sum() // pieces_wanted))
    parts = -(-blocks // most_blocks)
    # sum(ceil(blocks / most)) <= sum(blocks) / most + rows <= pieces_wanted + rows
    num_pieces = min(pieces_wanted + num_rows, num_rows * -(-blocks_per_table // least_blocks))

    ends = jnp.cumsum(parts)
    piece = jnp.arange(num_pieces)
    row = jnp.searchsorted(ends, piece, side="right", method="compare_all").astype(jnp.int32)
    is_real = piece < ends[-1]
    row_or_last = jnp.minimum(row, num_rows - 1)
    part = piece - (ends - parts)[row_or_last]
    row_parts = jnp.maximum(parts[row_or_last], 1)
    begin = first[row_or_last] + part * blocks[row_or_last] // row_parts
    end = first[row_or_last] + (part + 1) * blocks[row_or_last] // row_parts
    fields = Piece(
        row=row_or_last,
        table=tables[row_or_last],
        start=starts[row_or_last],
        length=lengths[row_or_last],
        first_block=jnp.where(is_real, begin, 0),
        end_block=jnp.where(is_real, end, 0),
    )
    return Pieces(fields=jnp.stack(fields, axis=1).astype(jnp.int32), rows=jnp.where(is_real, row, num_rows))


def stack_heads(q: Array, kv_heads: int) -> Array:
    """[rows, queries, heads, head_dim] -> [rows, kv_heads, queries * group, head_dim]: heads that share a KV head."""
    num_rows, queries, num_heads, head_dim = q.shape
    stacked = q.reshape(num_rows, queries, kv_heads, num_heads // kv_heads, head_dim).transpose(0, 2, 1, 3, 4)
    return stacked.reshape(num_rows, kv_heads, -1, head_dim)


def unstack_heads(stacked: Array, queries: int) -> Array:
    """The inverse of `stack_heads`."""
    num_rows, kv_heads, query_rows, head_dim = stacked.shape
    out = stacked.reshape(num_rows, kv_heads, queries, query_rows // queries, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_rows, queries, -1, head_dim)


def cost(
    q: Array, kv: KVPages, block_tables: Array, values: jax.ShapeDtypeStruct, *, sliding_window: int | None
) -> pl.CostEstimate:
    """What a call costs if every row is as long as its block table: the compiler cannot know better.

    Args:
      values: the pieces' results.
    """
    num_rows, queries, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = kv.data.shape
    keys = block_tables.shape[1] * page_size
    if sliding_window is not None:
        keys = min(keys, sliding_window + queries - 1)
    scores = num_rows * queries * num_heads * keys
    read = num_rows * keys * token_bytes(kv_heads, head_dim, kv.dtype) + q.size * q.dtype.itemsize
    read += block_tables.size * block_tables.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * scores * head_dim,
        transcendentals=scores,
        bytes_accessed=read + values.size * values.dtype.itemsize,
    )


def merge(values: Array, log_sums: Array, pieces: Pieces, num_rows: int, sinks: Array | None) -> Array:
    """The attention of each row from that of its pieces.

    Args:
      values: float32[pieces, kv_heads, queries * group, head_dim], each piece's softmax over its own keys times their
        values; may be anything, NaN too, where a piece has no blocks.
      log_sums: float32[pieces, kv_heads, queries * group], the logarithm of each piece's sum of exponentials; near
        MASKED where a query saw nothing.
      sinks: [heads], logits that join the denominators and have no value, or None.

    Returns:
      float32[rows, kv_heads, queries * group, head_dim]; zero for rows without pieces.
    """
    is_real = (pieces.rows < num_rows)[:, None, None]
    log_sums = jnp.where(is_real, log_sums, MASKED)
    shape = (num_rows + 1, *log_sums.shape[1:])  # the last takes what belongs to no row
    row_max = jnp.full(shape, MASKED, jnp.float32).at[pieces.rows].max(log_sums, indices_are_sorted=True)
    if sinks is not None:
        kv_heads, query_rows = log_sums.shape[1:]
        own = sinks.astype(jnp.float32).reshape(kv_heads, 1, -1)
        own = jnp.broadcast_to(own, (kv_heads, query_rows // own.shape[2], own.shape[2])).reshape(kv_heads, query_rows)
        row_max = jnp.maximum(row_max, own)
    shares = jnp.where(is_real, jnp.exp(log_sums - row_max[pieces.rows]), 0.0)
    weighted = jnp.where(is_real[..., None], values * shares[..., None], 0.0)
    row_sums = jnp.zeros(shape, jnp.float32).at[pieces.rows].add(shares, indices_are_sorted=True)[:num_rows]
    merged = jnp.zeros((*shape, values.shape[-1]), jnp.float32).at[pieces.rows].add(weighted, indices_are_sorted=True)
    if sinks is not None:
        row_sums += jnp.exp(own - row_max[:num_rows])
    return merged[:num_rows] / jnp.where(row_sums > 0, row_sums, 1.0)[..., None]
