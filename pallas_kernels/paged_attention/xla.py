"""Paged attention in plain XLA: the reference for every kernel, and the CPU's production path.

The work is a flat list of items. An item is one row with a few neighbouring pages of its sequence; rows contribute as
many items as their visible keys need:

    lengths 40, 0, 150; 64 keys an item  ->  items (row 0: keys 0..63) (row 2: 0..63) (row 2: 64..127) (row 2: 128..191)

A loop takes a fixed number of items at a time, and its trip count follows the sum of the real lengths: neither the
longest row nor the context length costs anything by itself. Each item yields a partial softmax (maximum, sum, weighted
values), merged into its row as in FlashAttention (Dao et al. 2022) and Flash-Decoding.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.bits import from_bits, to_bits
from pallas_kernels.kv_format import KVPages, scale_of, unpack
from pallas_kernels.paged_attention.shape import AttentionShape

# Measured on x86 on rows of 64 to 480 keys: 128 keys an item and 64 items a turn are both slower by a fifth.
KEYS_PER_ITEM = 64
# A turn takes two items a row, up to a limit: fewer rows have fewer items, and a turn pays for all it could take.
ITEMS_PER_ROW = 2
DECODE_ITEMS_PER_TURN = 32
PREFILL_ITEMS_PER_TURN = 16  # an item of a prefill block carries block_q times the scores
MASKED = -1e30  # finite, so that where all is masked there is no NaN


def unsupported(shape: AttentionShape) -> str | None:
    """None: plain XLA serves every shape on every device."""
    del shape
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
) -> Array:
    """See `api.paged_attention`; `tables`, `starts` and `lengths` are the fields of `AttentionRows`."""
    num_rows, queries, num_heads, head_dim = q.shape
    _, kv_heads, page_size, _ = kv.data.shape
    group = num_heads // kv_heads
    item_pages = min(max(1, KEYS_PER_ITEM // page_size), block_tables.shape[1])
    item_keys = item_pages * page_size
    most_items = num_rows * -(-block_tables.shape[1] // item_pages)
    most_per_turn = DECODE_ITEMS_PER_TURN if queries == 1 else PREFILL_ITEMS_PER_TURN
    turn = min(ITEMS_PER_ROW * num_rows, most_per_turn, most_items)

    # [rows, kv_heads, queries * group, head_dim]: the heads that share a KV head share its GEMM.
    q = (q * scale).reshape(num_rows, queries, kv_heads, group, head_dim)
    q = q.transpose(0, 2, 1, 3, 4).reshape(num_rows, kv_heads, queries * group, head_dim)
    query_positions = jnp.repeat(starts[:, None] + jnp.arange(queries), group, axis=1)

    first_visible = jnp.zeros_like(starts) if sliding_window is None else jnp.maximum(0, starts - sliding_window + 1)
    first_item = first_visible // item_keys
    num_items = jnp.where(lengths > 0, -(-lengths // item_keys) - first_item, 0)
    item_ends = jnp.cumsum(num_items)

    def take(array: Array, indices: Array) -> Array:
        return array.at[indices].get(mode="promise_in_bounds")

    def heads_first(pages: Array) -> Array:
        return pages.transpose(0, 2, 1, 3, 4).reshape(turn, kv_heads, item_keys, head_dim)

    def turn_of_items(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        row_max, row_sum, row_values = state
        item = i * turn + jnp.arange(turn)
        row = jnp.minimum(jnp.searchsorted(item_ends, item, side="right"), num_rows - 1)
        real = item < item_ends[-1]
        first_page = (item - take(item_ends, row) + take(num_items, row) + take(first_item, row)) * item_pages
        page_index = jnp.minimum(first_page[:, None] + jnp.arange(item_pages), block_tables.shape[1] - 1)
        pages = block_tables.at[take(tables, row)[:, None], page_index].get(mode="promise_in_bounds")
        pages = jnp.where(real[:, None], pages, 0)
        # Gathered and turned in one go, the CPU copies element by element; the barrier makes two fast copies of it.
        lines = from_bits(jax.lax.optimization_barrier(take(to_bits(kv.data), pages)), kv.data.dtype)
        k, v = map(heads_first, unpack(lines, kv.dtype))  # [items, kv_heads, keys, head_dim]

        key_positions = first_page[:, None] * page_size + jnp.arange(item_keys)
        usable = (key_positions < take(lengths, row)[:, None]) & real[:, None]
        usable &= key_positions >= take(first_visible, row)[:, None]
        seen = usable[:, None, :]
        if queries > 1:  # the only query of a row sees all that is usable
            seen &= key_positions[:, None, :] <= take(query_positions, row)[:, :, None]
            if sliding_window is not None:
                seen &= key_positions[:, None, :] > take(query_positions, row)[:, :, None] - sliding_window

        scores = jnp.einsum("ihqd,ihtd->ihqt", take(q, row), k, preferred_element_type=jnp.float32)
        if kv.scales is not None:  # [items, kv_heads, 2, 1, keys]
            scales = scale_of(take(kv.scales, pages)).transpose(0, 2, 3, 1, 4).reshape(turn, kv_heads, 2, 1, item_keys)
            scores *= scales[:, :, 0]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen[:, None], scores, MASKED)
        item_max = scores.max(-1)  # [items, kv_heads, queries * group]
        weights = jnp.exp(scores - item_max[..., None])
        item_sum = weights.sum(-1)
        # A weight of 0 does not silence what a stale page holds: 0 * NaN is NaN.
        v = jnp.where(usable[:, None, :, None], v, 0)
        if kv.scales is not None:
            weights *= jnp.where(usable[:, None, None], scales[:, :, 1], 0)
        item_values = jnp.einsum("ihqt,ihtd->ihqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)

        # Several items of a turn may belong to one row. What a query saw nothing of has weights of 1, and a share of
        # exp(MASKED - max) = 0 as soon as it sees anything; so have the items past the last.
        merged_max = row_max.at[row].max(item_max, mode="promise_in_bounds")
        item_share = jnp.exp(item_max - take(merged_max, row))
        row_share = jnp.exp(row_max - merged_max)
        row_sum = (row_sum * row_share).at[row].add(item_sum * item_share, mode="promise_in_bounds")
        row_values = (
            (row_values * row_share[..., None])
            .at[row]
            .add(item_values * item_share[..., None], mode="promise_in_bounds")
        )
        return merged_max, row_sum, row_values

    state = (
        jnp.full(q.shape[:3], MASKED, jnp.float32),
        jnp.zeros(q.shape[:3], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    num_turns = -(-item_ends[-1] // turn)
    row_max, row_sum, row_values = jax.lax.fori_loop(0, num_turns, turn_of_items, state)
    if sinks is not None:
        # [kv_heads, queries * group], as the heads lie in the rows
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, 1, group), (1, queries, 1)).reshape(kv_heads, -1)
        merged_max = jnp.maximum(row_max, sink)
        row_share = jnp.exp(row_max - merged_max)
        row_sum = row_sum * row_share + jnp.exp(sink - merged_max)
        row_values = row_values * row_share[..., None]
    out = jnp.where((lengths > 0)[:, None, None, None], row_values / row_sum[..., None], 0.0)
    out = out.reshape(num_rows, kv_heads, queries, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_rows, queries, num_heads, head_dim).astype(q.dtype)
