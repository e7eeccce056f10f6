"""Paged attention on TPU: one Pallas kernel for decode rows and prefill blocks; docs/kernels.md draws it.

The pages that a program's rows may see are one stream, row after row; the kernel takes it in steps of a fixed number of
pages and asks a step neither whose pages it holds nor how many sequences they come from:

    rows  0: 3 pages   1: padding   2: 1 page   3: 6 pages     ->     steps  [0 0 0 2] [3 3 3 3] [3 3 . .]

While a step is computed, the pages of the next one are on their way, be they of the same row, the next row or the next
program. A step scores all its keys against all queries of the program; a mask keeps to each query its own keys. On the
MXU that costs next to nothing, because keys are what it has to load and a few more queries pass through them, and so
short sequences are as well packed as long ones.

Narrow pages come with their scales, int16[2, page_size] a KV head, and are widened in VMEM once a step and head. A
key's scale multiplies its scores and a value's scale its weights: a row of numbers, where codes would be 2 * head_dim.

For the mask, key `position` of row `row` has the coordinate `row * SPAN + position` on one line of numbers; every query
sees an interval of that line. Block tables stay in HBM, and so does their size: a ring in SMEM holds the next few
chunks of TABLE_CHUNK entries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_dtype import SCALE_BYTES, KVDtype, is_quantized
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention.shape import AttentionShape
from pallas_kernels.paged_attention.tpu_stream import OWNER, RING, SPAN, STEP, TABLE_CHUNK, WALK, Ref, Stream
from pallas_kernels.paged_attention.tpu_widen import LIFT, UNIT, widen
from pallas_kernels.paged_attention.tuning import TpuSizes, tpu_sizes

MASKED, LEAST = -1e30, -5e29  # a masked score, and the least maximum: exp(MASKED - LEAST) is 0, and nothing is NaN
LANES = 128
FEW = 16  # query rows at a time in what is not worth tuning: the registers hold them, whatever else there is


def unsupported(shape: AttentionShape) -> str | None:
    """Why this kernel cannot serve the shape; None if it can."""
    if shape.kv_dtype == "float16":
        return "keys and values are float16; all other formats are implemented"
    narrow = is_quantized(shape.kv_dtype)
    # A copy's target begins at a whole tile: 8 or 16 rows of floats, 128 lanes of scales.
    tile = LANES if narrow else 8 if shape.kv_dtype == "float32" else 16
    if shape.page_size < tile or shape.page_size & (shape.page_size - 1):
        why = ", for their scales lie along the lanes" if narrow else ""
        return (
            f"page_size is {shape.page_size}; {shape.kv_dtype} pages must be a power of two of at least {tile}{why} "
            f"(cache.page_size: {tile})"
        )
    if shape.kv_dtype == "int4" and shape.head_dim % LANES:
        return (
            f"head_dim is {shape.head_dim}; int4 pages have lines of head_dim bytes, in memory of whole {LANES}: "
            "int8 takes no more (cache.dtype: int8)"
        )
    if shape.head_dim > 256:
        return f"head_dim is {shape.head_dim}; at most 256 is implemented"
    return None


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
    interpret: bool | pltpu.InterpretParams,
) -> Array:
    """See `api.paged_attention`; `tables`, `starts` and `lengths` are the fields of `AttentionRows`.

    Args:
      interpret: simulate the TPU; True for the simulator's defaults.
    """
    num_rows, queries, heads, head_dim = q.shape
    num_pages, kv_heads, page_size, width = kv.data.shape
    group, kv_dim = heads // kv_heads, 2 * head_dim
    narrow = kv.scales is not None
    wide = kv.data.dtype  # of what the MXU multiplies
    if narrow:
        wide = jnp.dtype(jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16)
    token_bytes = width * kv.data.dtype.itemsize + 2 * SCALE_BYTES * narrow
    sizes = tpu_sizes(
        queries=queries,
        group=group,
        kv_heads=kv_heads,
        page_size=page_size,
        kv_bytes=token_bytes,
        is_float32=wide == jnp.float32,
        is_narrow=narrow,
    )
    if interpret is True:
        interpret = pltpu.InterpretParams()
    cores = interpret.num_cores_or_threads if interpret else pltpu.get_tpu_info().num_cores
    programs = -(-num_rows // (sizes.rows * cores))  # of one core
    padded_rows = programs * sizes.rows * cores
    row_queries = queries * group
    block_rows = sizes.rows * row_queries

    def padded(array: Array, extra: int = 0) -> Array:
        return jnp.pad(array, [(0, padded_rows + extra - num_rows)] + [(0, 0)] * (array.ndim - 1))

    # One padding row more, so that the row after the last can be asked for.
    tables, starts, lengths = (padded(array, extra=1) for array in (tables, starts, lengths))
    row_numbers = jnp.arange(padded_rows + 1, dtype=jnp.int32)
    next_real = lax.cummin(jnp.where(lengths > 0, row_numbers, padded_rows), reverse=True)

    # Keys are the lower lanes of a pair, values the upper. Where a half is no whole number of vector registers, the
    # pair is used whole: zeros in the query silence the values, and the output's upper half is what is wanted.
    halves = head_dim % LANES == 0
    q_dim = out_dim = head_dim if halves else kv_dim
    lifted = q.astype(wide) * LIFT[kv.dtype] if narrow else q.astype(wide)
    grouped = padded(lifted).reshape(padded_rows, queries, kv_heads, group, head_dim).transpose(2, 0, 1, 3, 4)
    grouped = grouped.reshape(kv_heads, padded_rows * row_queries, head_dim)
    grouped = jnp.pad(grouped, [(0, 0), (0, 0), (0, q_dim - head_dim)])

    chunks = -(-block_tables.shape[1] // TABLE_CHUNK)
    table_width = chunks * TABLE_CHUNK
    flat_tables = jnp.pad(block_tables, [(0, 0), (0, table_width - block_tables.shape[1])]).reshape(-1)

    block = pl.BlockSpec((kv_heads, block_rows, q_dim), lambda core, i, *_: (0, core * programs + i, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    operands, in_specs = [grouped, flat_tables, kv.data], [block, in_hbm, in_hbm]
    if kv.scales is not None:
        operands.append(kv.scales)
        in_specs.append(in_hbm)
    if sinks is not None:
        of_row = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, sizes.rows * queries))
        operands.append(of_row[:, :, None])
        in_specs.append(pl.BlockSpec((kv_heads, block_rows, 1), lambda *_: (0, 0, 0)))

    # The lengths are not known here: the estimate is of full block tables, or of the whole pool.
    row_keys = block_tables.shape[1] * page_size
    if sliding_window is not None:
        row_keys = min(row_keys, sliding_window + queries - 1)
    keys = min(num_rows * row_keys, num_pages * page_size)
    cost = pl.CostEstimate(
        flops=4 * keys * heads * queries * head_dim,
        transcendentals=keys * heads * queries,
        bytes_accessed=keys * kv_heads * token_bytes
        + 2 * grouped.size * grouped.dtype.itemsize
        + flat_tables.size * flat_tables.dtype.itemsize,
    )
    kernel = functools.partial(
        _kernel,
        sizes=sizes,
        table_width=table_width,
        queries=queries,
        group=group,
        halves=halves,
        narrow=kv.dtype if narrow else None,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    step_keys = sizes.pages * page_size
    of_narrow = [
        pltpu.VMEM((2, kv_heads, 2, step_keys), jnp.int16),  # scales of the stream's steps, bits of bfloat16
        pltpu.VMEM((step_keys, kv_dim), wide),  # a step's keys and values of one head, widened
    ]
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, programs),
            in_specs=in_specs,
            out_specs=block,
            scratch_shapes=[
                *(of_narrow if narrow else ()),
                pltpu.VMEM((2, kv_heads, step_keys, width), kv.data.dtype),  # the stream's steps, by turns
                pltpu.VMEM((kv_heads, block_rows, LANES), jnp.float32),  # running maximum, the same in all lanes
                pltpu.VMEM((kv_heads, block_rows, LANES), jnp.float32),  # running sum, likewise
                pltpu.VMEM((kv_heads, block_rows, out_dim), jnp.float32),  # running weighted values
                pltpu.VMEM((2, block_rows, 1), jnp.int32),  # first and last coordinate that each query sees
                pltpu.VMEM((block_rows, step_keys), jnp.float32),  # 1 where a query sees a key of the step
                pltpu.SMEM((RING, TABLE_CHUNK), jnp.int32),
                pltpu.SMEM((2, sizes.pages), jnp.int32),  # page ids of a step
                pltpu.SMEM((2, 3 * sizes.pages), jnp.int32),  # segments of a step: slot, row, page
                pltpu.SMEM((2, 2), jnp.int32),  # how many segments and pages a step has
                pltpu.SMEM((WALK,), jnp.int32),  # the way through the stream
                pltpu.SemaphoreType.DMA((RING,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((kv_heads, padded_rows * row_queries, out_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        cost_estimate=cost,
        interpret=interpret,
        name="paged_attention",
    )(tables, starts, lengths, next_real, *operands)
    out = out[:, : num_rows * row_queries, out_dim - head_dim :]
    out = out.reshape(kv_heads, num_rows, queries, group, head_dim).transpose(1, 2, 0, 3, 4)
    return out.reshape(q.shape)


def _kernel(
    tables: Ref,
    starts: Ref,
    lengths: Ref,
    next_real: Ref,
    q: Ref,
    table_hbm: Ref,
    kv_hbm: Ref,
    *rest: Ref,
    sizes: TpuSizes,
    table_width: int,
    queries: int,
    group: int,
    halves: bool,
    narrow: KVDtype | None,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    """One program: the rows [program * rows, (program + 1) * rows), computed from the steps of the stream they own."""
    scales_hbm, rest = (rest[0], rest[1:]) if narrow else (None, rest)
    sinks, rest = (rest[0], rest[1:]) if has_sinks else (None, rest)
    out, rest = rest[0], rest[1:]
    scale_buffers, widened, rest = (*rest[:2], rest[2:]) if narrow else (None, None, rest)
    buffers, row_max, row_sum, row_values, seen_span, is_seen, *walk_refs = rest
    core, programs = pl.program_id(0), pl.num_programs(1)
    program = core * programs + pl.program_id(1)
    stream = Stream(
        (core + 1) * programs * sizes.rows,
        sizes.rows,
        table_width,
        sliding_window,
        tables,
        starts,
        lengths,
        next_real,
        table_hbm,
        kv_hbm,
        scales_hbm,
        buffers,
        scale_buffers,
        *walk_refs,
    )
    kv_heads, block_rows, q_dim = q.shape
    tiles = block_rows // sizes.query_rows
    unlift = UNIT[narrow] / LIFT[narrow] if narrow else 1.0
    dot = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        stream.begin(core * programs * sizes.rows)

    _write_seen_spans(seen_span, stream, program * sizes.rows, queries, group)

    def tile_rows(tile: Array) -> Any:
        return pl.ds(pl.multiple_of(tile * sizes.query_rows, sizes.query_rows), sizes.query_rows)

    def few_rows(i: Array) -> Any:
        return pl.ds(pl.multiple_of(i * FEW, FEW), FEW)

    def begun(i: Array, _: None) -> None:
        head, here = lax.div(i, block_rows // FEW), few_rows(lax.rem(i, block_rows // FEW))
        if sinks is None:
            row_max[head, here] = jnp.full((FEW, LANES), LEAST, jnp.float32)
            row_sum[head, here] = jnp.zeros((FEW, LANES), jnp.float32)
        else:  # a sink is a key seen already, of weight exp(sink - sink) = 1, and of no value
            row_max[head, here] = jnp.broadcast_to(sinks[head, here], (FEW, LANES))
            row_sum[head, here] = jnp.ones((FEW, LANES), jnp.float32)
        row_values[head, here] = jnp.zeros((FEW, row_values.shape[2]), jnp.float32)

    lax.fori_loop(0, kv_heads * (block_rows // FEW), begun, None)

    def attend(buffer: Array, line: Array) -> None:
        """Adds a step's keys to the running softmax. line: int32[1, step_keys], coordinates, -1 for no key."""

        def mask(i: Array, _: None) -> None:
            here = few_rows(i)
            seen = (line >= seen_span[0, here]) & (line <= seen_span[1, here])
            is_seen[here] = seen.astype(jnp.float32)

        lax.fori_loop(0, block_rows // FEW, mask, None)

        def widen_part(dtype: KVDtype, head: Array, i: Array) -> None:
            here = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
            widened[here] = widen(buffers[buffer, head, here], dtype).astype(widened.dtype)

        def tile_of_head(unit: Array, _: None) -> None:
            head, tile = lax.div(unit, tiles), lax.rem(unit, tiles)
            here = tile_rows(tile)
            if narrow:

                @pl.when(tile == 0)
                def _() -> None:
                    lax.fori_loop(0, buffers.shape[2] // LANES, lambda i, _: widen_part(narrow, head, i), None)

                kv = widened[...]
            else:
                kv = buffers[buffer, head]
            k, v = (kv[:, :q_dim], kv[:, q_dim:]) if halves else (kv, kv)
            scores = dot(q[head, here], k, (((1,), (1,)), ((), ()))) * (scale * unlift)
            if narrow:  # two int16 rows are one of words: keys' scales in the low halves, values' in the high
                words = pltpu.bitcast(scale_buffers[buffer, head], jnp.int32)
                k_scales = pltpu.bitcast(words << 16, jnp.float32)
                v_scales = pltpu.bitcast(words & -(1 << 16), jnp.float32) * LIFT[narrow]
                scores = scores * k_scales
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores * (1 / soft_cap))
            seen = is_seen[here] > 0
            scores = jnp.where(seen, scores, MASKED)
            old_max = row_max[head, here]
            new_max = jnp.maximum(old_max, scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - _lanes(new_max, scores.shape[1]))
            share = jnp.exp(old_max - new_max)
            step_sum = weights.sum(axis=1, keepdims=True)
            if narrow:  # codes are finite whatever they are; a scale may be NaN, and 0 times NaN is NaN
                weights = jnp.where(seen, weights * v_scales, 0.0)
            values = dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
            # What is NaN in this step's values is NaN times 0 for the rows that have no key in it.
            values = jnp.where(step_sum == 0, 0.0, values)
            row_max[head, here] = new_max
            row_sum[head, here] = row_sum[head, here] * share + step_sum
            row_values[head, here] = row_values[head, here] * _lanes(share, values.shape[1]) + values

        lax.fori_loop(0, kv_heads * tiles, tile_of_head, None)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, _ = state
        buffer = lax.rem(number, 2)
        owner_of_next = stream.fetch(1 - buffer)
        stream.wait(buffer)
        segments = stream.num_segments(buffer)
        if narrow:
            attend(buffer, stream.line(buffer, 0, segments))
            return number + 1, owner_of_next
        stream.silence(buffer, 0, segments)
        # Rows that share a step share its values, and 0 times one's NaN is NaN for the others.
        alone = (segments > 1) & _any_broken(buffers, buffer)

        def one_pass(i: Array, _: None) -> None:
            first, end = jnp.where(alone, i, 0), jnp.where(alone, i + 1, segments)

            pl.when(alone)(lambda: stream.keep_only(buffer, i))
            attend(buffer, stream.line(buffer, first, end))

        lax.fori_loop(0, jnp.where(alone, segments, 1), one_pass, None)
        return number + 1, owner_of_next

    walk = stream.walk
    walk[STEP], walk[OWNER] = lax.while_loop(lambda state: state[1] == program, step, (walk[STEP], walk[OWNER]))

    def divided(unit: Array, _: None) -> None:
        head, here = lax.div(unit, tiles), tile_rows(lax.rem(unit, tiles))
        total = row_sum[head, here]
        inverse = _lanes(jnp.where(total == 0, 0.0, unlift / total), out.shape[2])
        out[head, here] = (row_values[head, here] * inverse).astype(out.dtype)

    lax.fori_loop(0, kv_heads * tiles, divided, None)


def _lanes(x: Array, lanes: int) -> Array:
    """[rows, LANES], all lanes alike, as [rows, lanes]: registers used again, where a broadcast would move lanes."""
    return jnp.tile(x, (1, -(-lanes // LANES)))[:, :lanes]


def _write_seen_spans(seen_span: Ref, stream: Stream, first_row: Array, queries: int, group: int) -> None:
    """Writes the first and last coordinate that each query row of a program sees. seen_span: int32[2, rows, 1]."""

    def divided(x: Array, by: int) -> Array:  # exact below 2^22; the VPU has no integer division
        return ((x.astype(jnp.float32) + 0.5) * (1 / by)).astype(jnp.int32)

    def part(i: Array, _: None) -> None:
        query_row = i * FEW + lax.broadcasted_iota(jnp.int32, (FEW, 1), 0)
        row = divided(query_row, queries * group)
        query = divided(query_row - row * (queries * group), group)

        def of_row(j: Array, arrays: tuple[Array, Array]) -> tuple[Array, Array]:
            start, length = arrays
            here = first_row + j
            return jnp.where(row == j, stream.starts[here], start), jnp.where(row == j, stream.lengths[here], length)

        start, length = lax.fori_loop(0, stream.rows, of_row, (jnp.zeros_like(row), jnp.zeros_like(row)))
        first = jnp.zeros_like(row)
        if stream.sliding_window is not None:
            first = jnp.maximum(0, start + query - (stream.sliding_window - 1))
        here = pl.ds(pl.multiple_of(i * FEW, FEW), FEW)
        seen_span[0, here] = row * SPAN + first
        seen_span[1, here] = row * SPAN + jnp.minimum(start + query, length - 1)

    lax.fori_loop(0, seen_span.shape[1] // FEW, part, None)


def _any_broken(buffers: Ref, buffer: Array) -> Array:
    """Whether a step holds NaN or an infinity, found by the MXU: 0 times them is NaN."""
    zeros = jnp.zeros((16, buffers.shape[2]), buffers.dtype)

    def of_head(head: Array, total: Array) -> Array:
        return total + jnp.dot(zeros, buffers[buffer, head], preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, buffers.shape[1], of_head, jnp.zeros((16, buffers.shape[3]), jnp.float32))
    return jnp.max(jnp.isnan(total).astype(jnp.float32)) > 0
