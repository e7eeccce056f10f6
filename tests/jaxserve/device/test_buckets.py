"""The closed set of step shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.device.buckets import StepShape, choose_shape, doublings, step_shapes

SHAPES = step_shapes((16, 1, 4), (8, 2))


def shape(rows: int, blocks: int) -> StepShape:
    return StepShape(decode_rows=rows, prefill_blocks=blocks)


def test_programs_are_a_sum_of_buckets_not_a_product() -> None:
    assert (shape(1, 0), shape(4, 0), shape(16, 0), shape(16, 2), shape(16, 8)) == SHAPES


@pytest.mark.parametrize(
    ("rows", "blocks", "chosen"),
    [
        (0, 0, shape(1, 0)),
        (1, 0, shape(1, 0)),
        (2, 0, shape(4, 0)),
        (4, 0, shape(4, 0)),
        (5, 0, shape(16, 0)),
        (16, 0, shape(16, 0)),
        (0, 1, shape(16, 2)),
        (16, 2, shape(16, 2)),
        (1, 3, shape(16, 8)),
        (16, 8, shape(16, 8)),
    ],
)
def test_a_step_runs_in_the_smallest_shape_that_holds_it(rows: int, blocks: int, chosen: StepShape) -> None:
    assert choose_shape(SHAPES, rows, blocks) == chosen


@pytest.mark.parametrize(("rows", "blocks"), [(17, 0), (0, 9), (17, 9)])
def test_a_step_that_nothing_holds_is_our_own_error(rows: int, blocks: int) -> None:
    with pytest.raises(AssertionError, match=f"no compiled step holds {rows} decode rows and {blocks} prefill blocks"):
        choose_shape(SHAPES, rows, blocks)


@pytest.mark.parametrize(
    ("smallest", "limit", "sizes"),
    [(8, 1, (1,)), (8, 8, (8,)), (8, 15, (15,)), (8, 32, (8, 16, 32)), (2, 17, (2, 4, 8, 17)), (4, 24, (6, 12, 24))],
)
def test_halves_of_the_limit_end_at_the_smallest(smallest: int, limit: int, sizes: tuple[int, ...]) -> None:
    assert doublings(smallest, limit) == sizes


buckets = st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple)


@given(buckets, buckets, st.data())
def test_whatever_the_largest_buckets_hold_has_a_shape(
    decode: tuple[int, ...], prefill: tuple[int, ...], data: st.DataObject
) -> None:
    shapes = step_shapes(decode, prefill)
    rows = data.draw(st.integers(0, max(decode)))
    blocks = data.draw(st.integers(0, max(prefill)))
    chosen = choose_shape(shapes, rows, blocks)
    assert chosen.decode_rows >= rows
    assert chosen.prefill_blocks >= blocks
    assert bool(chosen.prefill_blocks) == bool(blocks), "a step without prompts must not pay for blocks"
