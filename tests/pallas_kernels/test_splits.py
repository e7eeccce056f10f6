"""Rows cut into pieces, and pieces merged: properties, and a softmax over everything at once."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import splits
from pallas_kernels.paged_attention.splits import Pieces

BLOCK = 16


def cut(starts: list[int], lengths: list[int], window: int | None, wanted: int, least: int) -> Pieces:
    return splits.cut(
        jnp.arange(len(lengths)),
        jnp.array(starts),
        jnp.array(lengths),
        block_keys=BLOCK,
        blocks_per_table=20,
        sliding_window=window,
        pieces_wanted=wanted,
        least_blocks=least,
    )


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("wanted", [1, 3, 50])
@pytest.mark.parametrize("least", [1, 4])
def test_pieces_hold_every_visible_block_once_and_none_is_much_larger(
    window: int | None, wanted: int, least: int
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        lengths = rng.choice([0, 1, 15, 16, 17, 33, 100, 320], 7)
        starts = np.maximum(0, lengths - rng.integers(1, 4, 7))
        pieces = cut(starts.tolist(), lengths.tolist(), window, wanted, least)
        fields = [dict(zip(splits.Piece._fields, piece, strict=True)) for piece in np.asarray(pieces.fields).tolist()]
        real = [f for f, row in zip(fields, pieces.rows.tolist(), strict=True) if row < 7]
        assert all(f["end_block"] > f["first_block"] for f in real)
        assert all(f["first_block"] == f["end_block"] for f in fields if f not in real)
        total = 0
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            first = 0 if window is None else max(0, start - window + 1) // BLOCK
            expected = list(range(first, -(-length // BLOCK))) if length else []
            own = [f for f in real if f["row"] == row]
            assert [block for f in own for block in range(f["first_block"], f["end_block"])] == expected
            assert all((f["table"], f["start"], f["length"]) == (row, start, length) for f in own)
            total += len(expected)
        limit = max(least, -(-total // wanted))
        assert all(f["end_block"] - f["first_block"] <= limit for f in real)


def test_merged_pieces_equal_one_softmax_whatever_empty_pieces_hold() -> None:
    rng = np.random.default_rng(1)
    lengths, heads, group, head_dim = [150, 0, 16], 2, 3, 8
    pieces = cut([0, 0, 0], lengths, None, wanted=5, least=2)
    scores = [rng.normal(0, 5, (heads, group, length)) for length in lengths]
    values = [rng.normal(0, 1, (heads, length, head_dim)) for length in lengths]
    sinks = rng.normal(0, 5, heads * group)
    count = pieces.rows.shape[0]
    partial, log_sums = np.full((count, heads, group, head_dim), np.nan), np.full((count, heads, group), np.nan)
    for i, (row, _, _, length, first, end) in enumerate(np.asarray(pieces.fields).tolist()):
        if end > first:
            keys = slice(first * BLOCK, min(length, end * BLOCK))
            weights = np.exp(scores[row][:, :, keys])
            partial[i] = weights @ values[row][:, keys] / weights.sum(-1, keepdims=True)
            log_sums[i] = np.log(weights.sum(-1))
    assert (pieces.rows == 0).sum() > 1, "the long row should have several pieces"
    for own_sinks in (None, sinks):
        merged = splits.merge(
            jnp.asarray(partial, jnp.float32),
            jnp.asarray(log_sums, jnp.float32),
            pieces,
            3,
            None if own_sinks is None else jnp.asarray(own_sinks, jnp.float32),
        )
        for row in range(3):
            weights = np.exp(scores[row])
            sums = weights.sum(-1, keepdims=True)
            sums += 0 if own_sinks is None else np.exp(own_sinks).reshape(heads, group, 1)
            expected = weights @ values[row] / np.where(sums > 0, sums, 1)
            np.testing.assert_allclose(merged[row], expected, atol=1e-5)


def test_stacked_heads_come_back_in_place() -> None:
    q = jnp.arange(2 * 3 * 6 * 4).reshape(2, 3, 6, 4)
    stacked = splits.stack_heads(q, 2)
    assert stacked.shape == (2, 2, 9, 4)
    np.testing.assert_array_equal(stacked[1, 1, 4], q[1, 1, 4])  # query 1 of 3, second of the 3 heads of KV head 1
    np.testing.assert_array_equal(splits.unstack_heads(stacked, 3), q)
