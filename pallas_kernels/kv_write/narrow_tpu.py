"""Writing narrow pages on TPU where no kernel serves them: XLA's scatter would rearrange the whole pool."""

import math

import jax.numpy as jnp
from jax import Array, lax

TILE_ROWS = 32  # tokens that lie in one tile of bytes


def write_tiles(
    data: Array, scales: Array, lines: Array, line_scales: Array, page_ids: Array, offsets: Array
) -> tuple[Array, Array]:
    """Places one token after another: its tile and its page's scales are read, changed and written whole.

    XLA scatters bytes only in tiles of 8 rows, and a program's arguments have tiles of 32: with a scatter, every layer
    of a step copies its pages there and back. Every token waits twice for its tile: `tpu.py` does better.

    Args:
      data: int8[pages, kv_heads, page_size, width]; updated in place where the caller donates it, as `scales` is.
      scales: int16[pages, kv_heads, 2, page_size].
      lines: int8[tokens, kv_heads, width].
      line_scales: int16[tokens, kv_heads, 2].
    """
    num_pages, kv_heads, page_size, width = data.shape
    rows = math.gcd(page_size, TILE_ROWS)
    tiles = data.reshape(num_pages, kv_heads, page_size // rows, rows, width)
    in_tile = lax.broadcasted_iota(jnp.int32, (1, 1, 1, rows, 1), 3)
    in_page = lax.broadcasted_iota(jnp.int32, (1, 1, 1, page_size), 3)

    def place(i: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        tiles, scales = pools
        page, offset = page_ids[i], offsets[i]
        at = (page, 0, offset // rows, 0, 0)
        tile = lax.dynamic_slice(tiles, at, (1, kv_heads, 1, rows, width))
        tile = jnp.where(in_tile == offset % rows, lines[i][None, :, None, None], tile)
        of_page = lax.dynamic_slice(scales, (page, 0, 0, 0), (1, *scales.shape[1:]))
        of_page = jnp.where(in_page == offset, line_scales[i][None, :, :, None], of_page)
        return lax.dynamic_update_slice(tiles, tile, at), lax.dynamic_update_slice(scales, of_page, (page, 0, 0, 0))

    tiles, scales = lax.fori_loop(0, len(page_ids), place, (tiles, scales))
    return tiles.reshape(data.shape), scales
