"""The split form of a model: every device gets the same, and every row is where its device needs it."""

import itertools
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from models.config import ModelConfig
from models.partition import Partition

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=157,
    hidden_size=12,
    intermediate_size=50,
    num_layers=1,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    max_position=8,
)


def heads_at(partition: Partition, axis: str, heads: int) -> list[int]:
    """Which head lies at each place, -1 for none."""
    spread = partition.spread((axis, "embed"))
    sources = np.arange(heads * 2) if spread is None else spread.sources
    return np.where(sources[::2] < 0, -1, sources[::2] // 2).tolist()


@pytest.mark.parametrize(
    ("tensor", "kv_heads", "heads"),
    [
        (1, [0, 1, 2], [0, 1, 2, 3, 4, 5]),
        (2, [0, 1, 2, -1], [0, 1, 2, 3, 4, 5, -1, -1]),
        (3, [0, 1, 2], [0, 1, 2, 3, 4, 5]),
        (8, [0, 0, 1, 1, 2, 2, -1, -1], [0, 1, 2, 3, 4, 5, -1, -1]),
    ],
)
def test_heads_lie_as_the_picture_says(tensor: int, kv_heads: list[int], heads: list[int]) -> None:
    partition = Partition(model=MODEL, tensor=tensor)
    assert heads_at(partition, "kv_heads", 3) == kv_heads
    assert heads_at(partition, "heads", 6) == heads


@pytest.mark.parametrize(
    ("kv_heads", "group", "tensor"), [*itertools.product((1, 2, 3, 5, 8), (1, 3, 4), (2, 3, 4, 8))]
)
def test_every_query_head_is_there_once_beside_a_copy_of_its_kv_head(kv_heads: int, group: int, tensor: int) -> None:
    model = replace(MODEL, num_heads=kv_heads * group, num_kv_heads=kv_heads)
    partition = Partition(model=model, tensor=tensor)
    split = partition.split_model()
    assert [n % tensor for n in (split.num_kv_heads, split.num_heads, split.vocab_size, split.intermediate_size)] == [
        0
    ] * 4
    assert split.num_kv_heads < max(kv_heads, tensor) + tensor  # never a device's worth too many
    heads, kv = heads_at(partition, "heads", kv_heads * group), heads_at(partition, "kv_heads", kv_heads)
    assert sorted(head for head in heads if head >= 0) == list(range(kv_heads * group))
    beside = split.num_heads // split.num_kv_heads
    assert all(kv[place // beside] == head // group for place, head in enumerate(heads) if head >= 0)


def test_what_divides_stays_the_stored_model() -> None:
    model = replace(MODEL, num_heads=16, num_kv_heads=8, vocab_size=160, intermediate_size=48)
    partition = Partition(model=model, tensor=8)
    assert partition.split_model() == model
    axes = [("vocab", "embed"), ("heads", "embed"), ("kv_heads", "embed"), ("embed", "mlp"), ("embed",)]
    assert [partition.spread(a) for a in axes] == [None] * 5


def test_a_spread_copies_rows_and_zeros_the_rest() -> None:
    spread = Partition(model=MODEL, tensor=2).spread(("embed", "heads"))
    assert spread is not None
    assert spread.stored_shape((12, 16)) == (12, 12)
    stored = np.arange(1.0, 145.0).reshape(12, 12)
    split = spread.apply(stored)
    np.testing.assert_array_equal(split[:, :12], stored)
    assert not split[:, 12:].any()
    assert Partition(model=MODEL, tensor=4).spread(("mlp",)).apply(np.ones(50)).tolist() == [1.0] * 50 + [0.0] * 2  # type: ignore[union-attr]


def test_a_wild_size_costs_nothing_before_the_stored_shapes_are_checked() -> None:
    wild = replace(MODEL, intermediate_size=2**31 - 1, vocab_size=2**31 - 2)
    tracemalloc.start()
    for tensor in (1, 2):
        partition = Partition(model=wild, tensor=tensor)
        for axes in (("vocab", "embed"), ("mlp", "embed")):
            spread = partition.spread(axes)
            assert spread is None or spread.stored_shape((2**31, 12))[0] < 2**31
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
