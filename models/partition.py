"""How a model is split over devices: its shape rounded up until all get the same, and where each row comes from.

The split form of a model is a larger model that computes the same: every device holds as many heads, MLP columns and
vocabulary rows as any other, and what was added is zero. This module knows numbers, no devices.

    3 KV heads with 2 query heads each      2 devices   KV 0  KV 1 | KV 2   -      q 0 1  2 3 | 4 5  - -
                                            4 devices   KV 0 | KV 1 | KV 2 | -     q 0 1 | 2 3 | 4 5 | - -
                                            8 devices   KV 0|0|1|1|2|2|-|-         q 0|1|2|3|4|5|-|-

Where the devices outnumber the KV heads, each KV head is kept on several of them, which share out its query heads.
A head of zeros yields zeros, whatever its keys are: its values, or its columns of the output projection, are 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from models.config import ModelConfig

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Where the slices of a parameter's split form come from.

    Attributes:
      axis: of the parameter; its other axis stays as it is.
      stored_size: slices that the checkpoint stores.
      find_sources: makes `sources`, once the stored shapes were checked: a wild number in a file costs nothing before.
    """

    axis: int
    stored_size: int
    find_sources: Callable[[], HostArray]

    @property
    def sources(self) -> HostArray:
        """int32[split size], the stored slice of each; -1 for zeros."""
        return self.find_sources()

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of a parameter whose split form has `shape`."""
        return (*shape[: self.axis], self.stored_size, *shape[self.axis + 1 :])

    def apply(self, stored: HostArray) -> HostArray:
        """The split form; a copy."""
        sources = self.sources
        split = stored.take(np.maximum(sources, 0), self.axis)
        split[(slice(None),) * self.axis + (sources < 0,)] = 0
        return split

    def of_groups(self, groups: int) -> "Spread | None":
        """Where groups of slices come from, so many of the split form; None where one is of slices that lay apart."""
        parts = self.sources.reshape(groups, -1)
        size = parts.shape[1]
        whole = np.where(parts[:, :1] < 0, -1, parts[:, :1] + np.arange(size))
        if (parts != whole).any() or (parts[:, 0] % size)[parts[:, 0] >= 0].any():
            return None
        sources = np.where(parts[:, 0] < 0, -1, parts[:, 0] // size).astype(np.int32)
        return Spread(axis=self.axis, stored_size=self.stored_size // size, find_sources=lambda: sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A model over `tensor` devices."""

    model: ModelConfig
    tensor: int

    @property
    def kv_copies(self) -> int:
        """Devices that keep the same KV head."""
        return max(1, self.tensor // self.model.num_kv_heads)

    def split_model(self) -> ModelConfig:
        """The shape of the split form; the model itself if everything divides."""
        model = self.model
        num_kv_heads = self._rounded(model.num_kv_heads * self.kv_copies)
        return replace(
            model,
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * self._group(),
            intermediate_size=self._rounded(model.intermediate_size),
            vocab_size=self._rounded(model.vocab_size),
        )

    def spread(self, axes: tuple[str | None, ...]) -> Spread | None:
        """The spread of a parameter with these logical axes; None where its split form is the stored one."""
        for axis, name in enumerate(axes):
            stored, split = (_axis_size(model, name) for model in (self.model, self.split_model()))
            if stored != split:  # of one size, they are the same: slices keep their order
                return Spread(axis=axis, stored_size=stored, find_sources=partial(self._sources, name))
        return None

    def _sources(self, name: str | None) -> HostArray:
        """The source of each slice of the split form of a logical axis."""
        model, split = self.model, self.split_model()
        match name:
            case "vocab":
                return _padded(model.vocab_size, split.vocab_size)
            case "mlp":
                return _padded(model.intermediate_size, split.intermediate_size)
            case "kv_heads":
                heads = _padded(model.num_kv_heads, split.num_kv_heads // self.kv_copies).repeat(self.kv_copies)
                return _rows(heads[: split.num_kv_heads], model.head_dim)
            case _:
                assert name == "heads", name
                return _rows(self._query_heads(split), model.head_dim)

    def _query_heads(self, split: ModelConfig) -> HostArray:
        """The query head at each place: `_group()` places beside each KV head."""
        of_kv_head = self.model.num_heads // self.model.num_kv_heads
        place = np.arange(split.num_heads)
        kv_place, in_place = place // self._group(), place % self._group()
        kv_head, copy = kv_place // self.kv_copies, kv_place % self.kv_copies
        in_group = copy * self._group() + in_place
        is_real = (kv_head < self.model.num_kv_heads) & (in_group < of_kv_head)
        return np.where(is_real, kv_head * of_kv_head + in_group, -1)

    def _group(self) -> int:
        """Query heads beside each copy of a KV head."""
        return -(-self.model.num_heads // self.model.num_kv_heads // self.kv_copies)

    def _rounded(self, size: int) -> int:
        return -(-size // self.tensor) * self.tensor


def _axis_size(model: ModelConfig, name: str | None) -> int:
    """Slices of a logical axis; 0 for one that is never split."""
    sizes = {
        "vocab": model.vocab_size,
        "mlp": model.intermediate_size,
        "kv_heads": model.num_kv_heads * model.head_dim,
        "heads": model.num_heads * model.head_dim,
    }
    return 0 if name is None else sizes.get(name, 0)


def _padded(size: int, split_size: int) -> HostArray:
    indices = np.arange(split_size, dtype=np.int32)
    return np.where(indices < size, indices, -1)


def _rows(heads: HostArray, head_dim: int) -> HostArray:
    """Each head's rows, -1 for the rows of head -1."""
    rows = heads[:, None] * head_dim + np.arange(head_dim)
    return np.where(heads[:, None] < 0, -1, rows).ravel().astype(np.int32)
