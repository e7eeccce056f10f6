"""Paged attention in Pallas for Mosaic GPU, on Hopper and Blackwell: pages by TMA, products by the tensor cores.

A row is cut into pieces by its actual length (`splits`). A program takes one piece and one KV head, and a tile of
queries: the heads that share the KV head stand in it as rows, one under another, query after query. Decode has few rows
and pads them to the tensor cores' least, which costs time that decode, waiting for memory, does not miss.

A program walks its piece in blocks of 64 keys. Pages come asynchronously into a ring of shared-memory slots, K and V of
one KV head side by side in one copy, several blocks ahead:

    copies    block 0 | block 1 | block 2 |            | block 3 -> slot 0 |            | block 4 -> slot 1
    computes                              | 0 (slot 0) |                   | 1 (slot 1) |

Each block is a step of FlashAttention's online softmax (Dao et al. 2022), in base 2.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_dtype import KVDtype, is_quantized
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import codes, splits, tuning
from pallas_kernels.paged_attention.gpu_cores import COPY_ROWS, Ref, TensorCore, load, swizzle, tensor_core, tiled
from pallas_kernels.paged_attention.shape import AttentionShape
from pallas_kernels.paged_attention.splits import MASKED, Piece

LOG2_E = math.log2(math.e)
SCALE_COPY = tuning.SCALE_COPY_BYTES // 2  # scales of a copy


def unsupported(shape: AttentionShape) -> str | None:
    """Why this kernel cannot serve the shape, or None."""
    if shape.platform == "gpu" and int(shape.compute_capability) not in (9, 10):
        return f"compute capability {shape.compute_capability} has neither wgmma (9.0) nor tcgen05 (10.x)"
    if shape.platform != "gpu" and not hasattr(plgpu, "InterpretGPUParams"):
        return f"jax {jax.__version__} cannot simulate it; 0.11 and later can"
    if shape.kv_dtype == "float32":
        return f"a {shape.kv_dtype} KV cache does not fit the tensor cores' 16-bit products; bfloat16 and float16 do"
    if shape.head_dim % (16 if shape.head_dim <= 128 else 32) or shape.head_dim > 256:
        return f"head_dim {shape.head_dim} is not a multiple of 16 up to 128, or of 32 up to 256"
    if shape.page_size % COPY_ROWS or max(shape.page_size, 64) % min(shape.page_size, 64):
        return f"page_size {shape.page_size} is not 8, 16, 32 or a multiple of 64"
    if is_quantized(shape.kv_dtype):
        if shape.head_dim % 32:
            return f"head_dim {shape.head_dim} is not a multiple of 32, as copies of a {shape.kv_dtype} KV cache need"
        if shape.kv_heads < _scale_heads(shape.page_size):
            return (
                f"page_size {shape.page_size} with {shape.kv_heads} KV heads lacks the {SCALE_COPY} scales of a copy; "
                f"page_size {SCALE_COPY // 2} has them with any number of heads"
            )
    return None


def _scale_heads(page_size: int) -> int:
    """Neighbouring heads whose scales, of keys and values, fill a copy."""
    return max(1, SCALE_COPY // (2 * page_size))


def _scale_copies(page_size: int, keys: int) -> int:
    """Of a block: one for each small page, of larger ones one for keys and one for values."""
    return keys // page_size if page_size <= SCALE_COPY // 2 else 2


def _attend(
    q_hbm: Ref,
    kv_hbm: Ref,
    scales_hbm: Ref,  # None where the format has no scales
    tables_hbm: Ref,
    pieces_hbm: Ref,
    out_hbm: Ref,
    log_sums_hbm: Ref,
    *,
    kv_dtype: KVDtype,
    core: TensorCore,
    blocks: tuning.MosaicBlocks,
    group: int,
    queries: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    """One program. q: [rows, kv_heads, query rows, head_dim]; the rest as in `paged_attention` and `splits`."""
    page_size, head_dim, dtype = kv_hbm.shape[2], q_hbm.shape[3], q_hbm.dtype
    narrow = is_quantized(kv_dtype)
    copy_keys = min(page_size, blocks.keys)
    rows = min(q_hbm.shape[2], core.tile_rows)  # of a tile, copied in and out
    columns = head_dim // blocks.column_parts
    tile_columns = math.gcd(blocks.keys, columns)
    key_copies = range(blocks.keys // copy_keys)
    piece_index, kv_head, tile = lax.axis_index("piece"), lax.axis_index("kv_head"), lax.axis_index("tile")
    # Of small pages several heads' scales come together, as a copy has 128 bytes at least.
    scale_copies = _scale_copies(page_size, blocks.keys)
    first_head = jnp.minimum(kv_head, kv_hbm.shape[1] - _scale_heads(page_size))
    piece = Piece(*(pieces_hbm[piece_index, i] for i in range(len(Piece._fields))))
    num_blocks = piece.end_block - piece.first_block
    first_visible = jnp.int32(0) if sliding_window is None else jnp.maximum(0, piece.start - sliding_window + 1)

    def copies_of(block: Array) -> list[tuple[Array, Any]]:
        """The page and the offset in it of each copy of a block."""
        first_page, last_page = lax.div(first_visible, page_size), lax.div(piece.length - 1, page_size)
        found = []
        for first_key in range(0, blocks.keys, copy_keys):
            key = block * blocks.keys + first_key
            # A block's pages that no query sees are copies of the nearest that one does.
            page_index = jnp.clip(lax.div(key, page_size), first_page, last_page)
            offset = lax.rem(key, page_size) if page_size > copy_keys else 0
            found.append((tables_hbm[piece.table, page_index], offset))
        return found

    def compute(
        warpgroup: int,
        kv_or_out: tuple[tuple[Ref, Ref], Ref],
        q_or_log_sums: tuple[Ref, Ref],
        weights_smem: Ref,
        scales_smem: Ref,
        filled: Ref,
        emptied: Ref,
        q_filled: Ref,
        agreed: Ref,
        scratch: tuple[Ref, ...],
    ) -> None:
        ((kv_smem, codes_smem), out_smem), (q_smem, log_sums_smem) = kv_or_out, q_or_log_sums
        row_part, column_part = divmod(warpgroup, blocks.column_parts)
        first_row = (tile * blocks.row_parts + row_part) * core.tile_rows
        row_layout = core.layout.reduce(1)

        def agree() -> None:
            if blocks.warpgroups > 1:
                plgpu.barrier_arrive(agreed)
                plgpu.barrier_wait(agreed)

        def start_copies(copies: list[tuple[Array, Any]], slot: Any) -> None:
            for i, (page, offset) in enumerate(copies):
                plgpu.copy_gmem_to_smem(
                    kv_hbm.at[page, kv_head, pl.ds(offset, copy_keys)],
                    (codes_smem if narrow else kv_smem).at[slot, pl.ds(i * copy_keys, copy_keys)],
                    filled.at[slot],
                )
                if narrow and page_size <= SCALE_COPY // 2:
                    start_scales(page, first_head * 2 * page_size, slot, i)
                elif narrow:
                    for half in range(2):
                        aligned = offset if copy_keys == SCALE_COPY else lax.div(offset, SCALE_COPY) * SCALE_COPY
                        start_scales(page, (kv_head * 2 + half) * page_size + aligned, slot, half)

        def start_scales(page: Array, first: Array, slot: Any, place: int) -> None:
            plgpu.copy_gmem_to_smem(
                scales_hbm.at[page, pl.ds(first, SCALE_COPY)],
                scales_smem.at[slot, pl.ds(place * SCALE_COPY, SCALE_COPY)],
                filled.at[slot],
            )

        def refill(i: Array) -> None:
            """Starts the copies of the block that takes the slot of block i - 1."""
            copies = copies_of(piece.first_block + i + blocks.slots - 1)
            slot = lax.rem(i + blocks.slots - 1, blocks.slots)

            @pl.when(i > 0)
            def _() -> None:
                plgpu.barrier_wait(emptied.at[slot])

            start_copies(copies, slot)

        def widen(slot: Array) -> None:
            """Makes numbers of a block's codes; a second warpgroup takes the values."""
            for half in range(2) if blocks.warpgroups == 1 else (warpgroup,):
                for first in range(0, head_dim, tile_columns):
                    own = codes_smem.at[
                        slot, :, pl.ds(first + (0 if kv_dtype == "int4" else half * head_dim), tile_columns)
                    ]
                    layout = plgpu.Layout.SMEM_GMEM_COPY(own.shape, dtype, swizzle(tile_columns, dtype))
                    numbers = codes.numbers(load(own, layout), kv_dtype, of_values=bool(half))
                    kv_smem[0, :, pl.ds(half * head_dim + first, tile_columns)] = numbers.astype(dtype)
            plgpu.commit_smem()
            agree()

        def token_scales(slot: Array, first_key: Array, half: int) -> Array:
            """float32[keys]. Copies lie apart; each is read from where it would be the right part of a whole."""
            layout = core.layout.reduce(0)
            column = plgpu.broadcasted_iota(jnp.int32, (blocks.keys,), 0, layout=layout)
            if page_size <= SCALE_COPY // 2:
                begin = ((kv_head - first_head) * 2 + half) * page_size
            else:
                begin = half * SCALE_COPY + lax.rem(first_key, SCALE_COPY)
            found = None
            for i in key_copies:
                whole = scales_smem.at[slot, pl.ds(begin + i * (SCALE_COPY - copy_keys), blocks.keys)]
                scales = codes.scales(load(whole, layout))
                found = scales if found is None else jnp.where(column >= i * copy_keys, scales, found)
            assert found is not None
            return found

        def per_column(numbers: Array) -> Array:
            """The same for every row of scores. The cast says for which of several layouts a column's is the same."""
            return plgpu.layout_cast(lax.broadcast_in_dim(numbers, (core.tile_rows, blocks.keys), [1]), core.layout)

        def silence(v: Ref, first_key: Array) -> None:
            """Makes zero what no query of the row may see: a weight of 0 does not silence it, for 0 * NaN is NaN."""
            if row_part == 0:
                layout = plgpu.Layout.SMEM_GMEM_COPY(v.shape, dtype, swizzle(tile_columns, dtype))
                key = first_key + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=layout)
                values = load(v, layout)
                v[...] = jnp.where((key >= first_visible) & (key < piece.length), values, jnp.zeros_like(values))
                plgpu.commit_smem()
            agree()

        def masked(scores: Array, first_key: Array) -> Array:
            """Scores in base 2, capped; MASKED where a query does not see a key."""
            if soft_cap is None:
                scores *= scale * LOG2_E
            else:  # tanh(x) = 1 - 2 / (1 + exp(2 x)): the hardware's own is good to three digits only
                root = lax.rsqrt(1 + jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap)))
                scores = (1 - 2 * root * root) * (soft_cap * LOG2_E)
            key = first_key + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=core.layout)
            if queries == 1:
                seen = key < piece.length
                if sliding_window is not None:
                    seen &= key >= first_visible
            else:
                query_row = first_row + plgpu.broadcasted_iota(jnp.int32, (core.tile_rows,), 0, layout=row_layout)
                position = lax.broadcast_in_dim(piece.start + lax.div(query_row, jnp.int32(group)), key.shape, [0])
                seen = (key < piece.length) & (key <= position)
                if sliding_window is not None:
                    seen &= key > position - sliding_window
            return jnp.where(seen, scores, MASKED)

        def step(i: Array, state: tuple[Array, Array, tuple[Array, ...]]) -> tuple[Array, Array, tuple[Array, ...]]:
            row_max, row_sum, values = state
            slot = lax.rem(i, blocks.slots)
            first_key = (piece.first_block + i) * blocks.keys
            wide_slot = 0 if narrow else slot
            k = kv_smem.at[wide_slot, :, pl.ds(0, head_dim)]
            v = kv_smem.at[wide_slot, :, pl.ds(head_dim + column_part * columns, columns)]
            if warpgroup == 0:
                pl.when(i + blocks.slots - 1 < num_blocks)(functools.partial(refill, i))
            plgpu.barrier_wait(filled.at[slot])
            if narrow:
                widen(slot)
            is_edge = (first_key < first_visible) | (first_key + blocks.keys > piece.length)
            pl.when(is_edge)(functools.partial(silence, v, first_key))

            scores = core.product(q_smem.at[row_part], k.T, warpgroup, scratch)(0, blocks.keys)
            if narrow:
                scores *= per_column(token_scales(slot, first_key, 0))
            scores = masked(scores, first_key)
            new_max = jnp.maximum(row_max, scores.max(axis=1))
            kept = jnp.exp2(row_max - new_max)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
            row_sum = row_sum * kept + weights.sum(axis=1)
            if narrow:
                column = plgpu.broadcasted_iota(jnp.int32, (blocks.keys,), 0, layout=core.layout.reduce(0))
                is_usable = (column >= first_visible - first_key) & (column < piece.length - first_key)
                value_scales = jnp.where(is_usable, token_scales(slot, first_key, 1), 0.0)
                weights *= per_column(value_scales)

            # One warpgroup is done with the keys of this block, and puts its weights in their place.
            own_weights = weights_smem.at[warpgroup] if blocks.weights else k.at[:, pl.ds(0, blocks.keys)]
            own_weights[...] = weights.astype(dtype)
            plgpu.commit_smem()
            part = core.product(own_weights, v, warpgroup, scratch)
            values = tuple(
                chunk * lax.broadcast_in_dim(kept, chunk.shape, [0]) + part(j * core.chunk, chunk.shape[1])
                for j, chunk in enumerate(values)
            )
            plgpu.barrier_arrive(emptied.at[slot])
            if narrow:
                agree()  # the next block is widened into the place of this one
            return new_max, row_sum, values

        if column_part == 0:
            plgpu.copy_gmem_to_smem(
                q_hbm.at[piece.row, kv_head, pl.ds(first_row, rows)],
                q_smem.at[row_part, pl.ds(0, rows)],
                q_filled.at[row_part],
            )
        for slot in range(blocks.slots - 1 if warpgroup == 0 else 0):

            @pl.when(slot < num_blocks)
            def _(slot: int = slot) -> None:
                start_copies(copies_of(piece.first_block + slot), slot)

        plgpu.barrier_wait(q_filled.at[row_part])
        chunks = [min(core.chunk, columns - first) for first in range(0, columns, core.chunk)]
        state = (
            plgpu.layout_cast(jnp.full((core.tile_rows,), MASKED, jnp.float32), row_layout),
            plgpu.layout_cast(jnp.zeros((core.tile_rows,), jnp.float32), row_layout),
            tuple(plgpu.layout_cast(jnp.zeros((core.tile_rows, n), jnp.float32), core.layout) for n in chunks),
        )
        row_max, row_sum, values = lax.fori_loop(0, num_blocks, step, state)

        agree()  # results go where blocks and queries were, and the other warpgroup may still read them
        for j, chunk in enumerate(values):
            out_smem[warpgroup, :, pl.ds(j * core.chunk, chunk.shape[1])] = chunk / lax.broadcast_in_dim(
                row_sum, chunk.shape, [0]
            )
        if column_part == 0:
            log_sums_smem[row_part] = row_max * (1 / LOG2_E) + jnp.log(row_sum)
        plgpu.commit_smem()
        own_columns = pl.ds(column_part * columns, columns)
        plgpu.copy_smem_to_gmem(
            out_smem.at[warpgroup, pl.ds(0, rows)],
            out_hbm.at[piece_index, kv_head, pl.ds(first_row, rows), own_columns],
        )
        if column_part == 0:
            plgpu.copy_smem_to_gmem(
                log_sums_smem.at[row_part, pl.ds(0, rows)],
                log_sums_hbm.at[piece_index, kv_head, pl.ds(first_row, rows)],
            )
        plgpu.wait_smem_to_gmem(0)

    def program(*memory: Any) -> None:
        for warpgroup in range(blocks.warpgroups):
            pl.when(lax.axis_index("warpgroup") == warpgroup)(functools.partial(compute, warpgroup, *memory))

    @pl.when(num_blocks > 0)
    def _() -> None:
        pl.run_scoped(
            program,
            plgpu.RefUnion(
                (
                    tiled((1 if narrow else blocks.slots, blocks.keys, 2 * head_dim), dtype, tile_columns),
                    tiled((blocks.slots, blocks.keys, kv_hbm.shape[3]), jnp.int8, tile_columns) if narrow else (),
                ),
                tiled((blocks.warpgroups, core.tile_rows, columns), jnp.float32, tile_columns),
            ),
            plgpu.RefUnion(
                tiled((blocks.row_parts, core.tile_rows, head_dim), dtype, tile_columns),
                plgpu.SMEM((blocks.row_parts, core.tile_rows), jnp.float32),
            ),
            tiled((blocks.weights, core.tile_rows, blocks.keys), dtype, tile_columns),
            plgpu.SMEM((blocks.slots, scale_copies * SCALE_COPY), jnp.int16) if narrow else (),
            plgpu.Barrier(
                num_arrivals=len(key_copies) + (scale_copies if narrow else 0), num_barriers=blocks.slots
            ),  # filled
            plgpu.Barrier(num_arrivals=blocks.warpgroups, num_barriers=blocks.slots),  # emptied
            plgpu.Barrier(num_barriers=blocks.row_parts),  # q_filled
            plgpu.Barrier(num_arrivals=blocks.warpgroups),  # agreed
            core.scratch(max(blocks.keys, columns), blocks.warpgroups),
            collective_axes="warpgroup",
        )


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
    num_pages, kv_heads, page_size, kv_width = kv.data.shape
    dtype = kv.data.dtype if kv.scales is None else q.dtype if q.dtype.itemsize == 2 else jnp.dtype(jnp.bfloat16)
    group = num_heads // kv_heads
    core = tensor_core()
    blocks = tuning.mosaic_blocks(
        query_rows=queries * group,
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        tile_rows=core.tile_rows,
        kv_bytes=kv_width * kv.data.dtype.itemsize,
        scale_copies=0 if kv.scales is None else _scale_copies(page_size, 64),
    )
    tile_rows = blocks.row_parts * core.tile_rows if queries * group > core.tile_rows else COPY_ROWS
    query_rows = -(-queries * group // tile_rows) * tile_rows
    tiles = -(-query_rows // (blocks.row_parts * core.tile_rows))

    stacked = splits.stack_heads(q, kv_heads).astype(dtype)
    stacked = jnp.pad(stacked, ((0, 0), (0, 0), (0, query_rows - queries * group), (0, 0)))
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
    out_shape = (pieces.rows.shape[0], kv_heads, query_rows, head_dim)
    values_type = jax.ShapeDtypeStruct(out_shape, jnp.float32)
    values, log_sums = pl.kernel(
        functools.partial(
            _attend,
            kv_dtype=kv.dtype,
            core=core,
            blocks=blocks,
            group=group,
            queries=queries,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        ),
        (values_type, jax.ShapeDtypeStruct(out_shape[:3], jnp.float32)),
        mesh=plgpu.Mesh(  # type: ignore[arg-type]
            grid=(out_shape[0], kv_heads, tiles),
            grid_names=("piece", "kv_head", "tile"),
            num_threads=blocks.warpgroups,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),  # no warp reduces another's
        interpret=plgpu.InterpretGPUParams() if interpret else False,  # type: ignore[attr-defined]  # from jax 0.11
        cost_estimate=splits.cost(q, kv, block_tables, values_type, sliding_window=sliding_window),
        name="paged_attention_mosaic",
    )(stacked, kv.data, None if kv.scales is None else kv.scales.reshape(num_pages, -1), block_tables, pieces.fields)
    real = slice(None), slice(None), slice(queries * group)
    return splits.unstack_heads(splits.merge(values[real], log_sums[real], pieces, num_rows, sinks), queries).astype(
        q.dtype
    )
