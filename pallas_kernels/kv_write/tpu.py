"""Writing narrow pages on TPU: tiles are read, changed and written back, many of them on their way at once.

A token's codes are one row of a tile of 32, and copies take whole tiles, as do scales, of which a copy takes a page's:

    tokens    page 7, 40   page 7, 41   page 2, 3   page 9, 127   page 9, 128   ...
    runs     [ tile 1 of page 7       ][ tile 0    ][ tile 3      ][ tile 0 of another page ...
    batch     read all | change each as it arrives, and send it back | wait for all

A run is of neighbouring tokens with one tile: a prompt's are read once for 32 of them. A batch has no page twice, so
that what is read was written before. Knows no format: codes are bytes, scales pairs of 16 bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE_ROWS, LANES = 32, 128
CHUNK_TOKENS = 64  # whose lines a program holds
BATCH_BYTES = 1 << 20  # of tiles: at 819 GB/s (v5e) they take as long as a copy takes to begin
MOST_RUNS = 16

Ref = Any  # of SMEM, VMEM or HBM; jax gives it no usable static type


def write_narrow(
    data: Array,
    scales: Array,
    lines: Array,
    line_scales: Array,
    page_ids: Array,
    offsets: Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array]:
    """Places each token's line and scales; of two tokens with one place the later one's.

    Args:
      data: int8[pages, kv_heads, page_size, width], page_size in whole LANES; updated in place where the caller
        donates it, as `scales` is.
      scales: int16[pages, kv_heads, 2, page_size].
      lines: int8[tokens, kv_heads, width].
      line_scales: int16[tokens, kv_heads, 2].
      page_ids, offsets: int32[tokens], in bounds.
      interpret: simulate the TPU; True for the simulator's defaults.
    """
    _, kv_heads, page_size, width = data.shape
    tokens = len(page_ids)
    chunk = min(CHUNK_TOKENS, tokens)
    programs = -(-tokens // chunk)
    tile_bytes = kv_heads * TILE_ROWS * width
    most_runs = max(1, min(MOST_RUNS, chunk, BATCH_BYTES // tile_bytes))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)

    def of_chunk(lanes: int) -> pl.BlockSpec:
        return pl.BlockSpec((chunk, kv_heads, lanes), lambda i, *_: (i, 0, 0))

    def padded(array: Array) -> Array:
        return jnp.pad(array, [(0, programs * chunk - tokens), (0, 0), (0, 0)])

    # Single bytes and halves are placed by arithmetic on the words that hold them.
    pairs = line_scales.astype(jnp.int32)
    pairs = (pairs[..., 1:] << 16) | (pairs[..., :1] & 0xFFFF)
    moved = tokens * (tile_bytes + kv_heads * 2 * page_size * scales.dtype.itemsize)
    out: tuple[Array, Array] = pl.pallas_call(
        functools.partial(_kernel, tokens=tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(programs,),
            in_specs=[of_chunk(width), of_chunk(1), in_hbm, in_hbm],
            out_specs=[in_hbm, in_hbm],
            scratch_shapes=[
                pltpu.VMEM((most_runs, kv_heads, TILE_ROWS, width), jnp.int8),
                pltpu.VMEM((most_runs, kv_heads, 2, page_size), jnp.int16),
                pltpu.SMEM((most_runs + 1,), jnp.int32),  # the first token of each run, and the token after the last
                pltpu.SemaphoreType.DMA((most_runs,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (data, scales)],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        # Of tokens that have a tile each, as decode rows do.
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * moved + 4 * (lines.size + pairs.size)
        ),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="kv_write",
    )(page_ids, offsets, padded(lines.astype(jnp.int32) & 0xFF), padded(pairs), data, scales)
    return out[0], out[1]


def _kernel(
    page_ids: Ref,
    offsets: Ref,
    lines: Ref,
    pairs: Ref,
    data_before: Ref,
    scales_before: Ref,
    data: Ref,
    scales: Ref,
    tiles: Ref,
    page_scales: Ref,
    runs: Ref,
    arrived: Ref,
    *,
    tokens: int,
) -> None:
    """One program: the lines of a chunk of tokens, in batches of runs."""
    del data_before, scales_before  # the same memory as what is written
    kv_heads = data.shape[1]
    first_token = pl.program_id(0) * lines.shape[0]
    end_token = jnp.minimum(first_token + lines.shape[0], tokens)

    def copies(token: Array, run: Array, *, back: bool) -> list[Any]:
        page = page_ids[token]
        rows = pl.ds(pl.multiple_of(lax.div(offsets[token], TILE_ROWS) * TILE_ROWS, TILE_ROWS), TILE_ROWS)
        pools, held = (data.at[page, :, rows], scales.at[page]), (tiles.at[run], page_scales.at[run])
        ways = zip(held, pools, strict=True) if back else zip(pools, held, strict=True)
        return [pltpu.make_async_copy(source, target, arrived.at[run]) for source, target in ways]

    def end_of_run(first: Array) -> Array:
        """The first token after `first` that has another tile."""

        def further(state: tuple[Array, Array]) -> tuple[Array, Array]:
            token = state[0] + 1
            here = jnp.minimum(token, tokens - 1)
            same_tile = lax.div(offsets[here], TILE_ROWS) == lax.div(offsets[first], TILE_ROWS)
            same = (token < end_token) & (page_ids[here] == page_ids[first]) & same_tile
            return token, same.astype(jnp.int32)

        return lax.while_loop(lambda state: state[1] > 0, further, (first, jnp.int32(1)))[0]

    def place(token: Array, run: Array) -> None:
        line, offset = token - first_token, offsets[token]
        row = lax.rem(offset, TILE_ROWS)
        shift = lax.rem(row, 4) * 8
        others = ~(jnp.int32(0xFF) << shift)

        def of_head(head: Array, _: None) -> None:
            here = pl.ds(head, 1)
            words = pltpu.bitcast(tiles[run, head], jnp.int32)
            changed = (words & others) | (lines[line, here] << shift)
            is_row = lax.broadcasted_iota(jnp.int32, words.shape, 0) == lax.div(row, 4)
            tiles[run, head] = pltpu.bitcast(jnp.where(is_row, changed, words), jnp.int8)
            words = pltpu.bitcast(page_scales[run, head], jnp.int32)
            is_here = lax.broadcasted_iota(jnp.int32, words.shape, 1) == offset
            page_scales[run, head] = pltpu.bitcast(jnp.where(is_here, pairs[line, here], words), jnp.int16)

        lax.fori_loop(0, kv_heads, of_head, None)

    def batch(token: Array) -> Array:
        """Writes as many runs as have room and pages of their own; returns the token after them."""

        def begin(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            token, count, _ = state
            runs[count] = token
            for copy in copies(token, count, back=False):
                copy.start()
            end = end_of_run(token)
            page = page_ids[jnp.minimum(end, tokens - 1)]

            def held(run: Array, times: Array) -> Array:
                return times + (page_ids[runs[run]] == page).astype(jnp.int32)

            is_held = lax.fori_loop(0, count + 1, held, jnp.int32(0)) > 0
            has_room = (end < end_token) & (count + 1 < tiles.shape[0]) & ~is_held
            return end, count + 1, has_room.astype(jnp.int32)

        start = (token, jnp.int32(0), jnp.int32(1))
        next_token, count, _ = lax.while_loop(lambda state: state[2] > 0, begin, start)
        runs[count] = next_token

        def change(run: Array, _: None) -> None:
            for copy in copies(runs[run], run, back=False):
                copy.wait()
            lax.fori_loop(runs[run], runs[run + 1], lambda token, _: place(token, run), None)
            for copy in copies(runs[run], run, back=True):
                copy.start()

        def finish(run: Array, _: None) -> None:
            for copy in copies(runs[run], run, back=True):
                copy.wait()

        lax.fori_loop(0, count, change, None)
        lax.fori_loop(0, count, finish, None)
        return next_token

    lax.while_loop(lambda token: token < end_token, batch, first_token)
