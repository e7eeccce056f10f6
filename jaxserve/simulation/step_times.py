"""Owns how long a step takes on one device, as a table by compiled shape; does not know how it was measured.

A step's time follows from its compiled shape (every row is computed, used or not) and from the keys that attention
reads. So the table holds, for each shape, seconds at a few numbers of keys, and is read linearly between them.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape
from jaxserve.errors import ConfigError

Points = tuple[list[float], list[float]]  # ascending x, and y at each


class StepTime(BaseModel):
    """One measurement: a compiled shape, the keys its rows and blocks read in all, and the step's seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    decode_rows: Annotated[int, Field(ge=0)]
    prefill_blocks: Annotated[int, Field(ge=0)]
    kv_tokens: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(gt=0)]


class PageCopyTime(BaseModel):
    """Seconds that a page takes to host memory (save) and back (restore), copied with as many others as fit a call."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    save_seconds: Annotated[float, Field(ge=0)]
    restore_seconds: Annotated[float, Field(ge=0)]


class StepTimes(BaseModel):
    """The times of one model's steps on one device.

    Attributes:
      source: "measured" on the device, or an "estimate" from its data sheet.
      config_digest: see `config_digest`; the table fits that configuration exactly, others by interpolation.
      block_q: tokens of a prefill block.
      host_seconds: what a step of a real run takes beyond its time on the device: the host's work that nothing hides.
      page_copy: None where the configuration keeps no pages in host memory (cache.host_pages).
      steps: in any order; several numbers of keys for each shape.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    device: str
    jax_version: str
    model: str
    config_digest: str
    source: Literal["measured", "estimate"] = "measured"
    block_q: PositiveInt
    host_seconds: Annotated[float, Field(ge=0)] = 0.0
    page_copy: PageCopyTime | None = None
    steps: Annotated[tuple[StepTime, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if any(step.decode_rows + step.prefill_blocks == 0 for step in self.steps):
            raise ValueError("a step has neither decode rows nor prefill blocks")
        keys = [(step.decode_rows, step.prefill_blocks, step.kv_tokens) for step in self.steps]
        if len(set(keys)) < len(keys):
            raise ValueError("a shape is listed twice with the same kv_tokens")
        return self

    def estimate(self, decode_rows: int, prefill_blocks: int, kv_tokens: int) -> float:
        """Seconds of a step on the device, run in the smallest measured shape that holds it.

        Args:
          kv_tokens: keys that attention reads: the sum of the decode rows' lengths and, for each prefill block, of the
            positions up to its end.
        """
        return self.of_shape(self._fit(decode_rows, prefill_blocks), kv_tokens)

    def of_shape(self, shape: StepShape, kv_tokens: int) -> float:
        """Seconds of a step that is compiled for `shape`.

        A shape that was not measured lies, by its tokens, between its neighbours of the same kind: with or without
        prefill blocks. Both ends are extended as straight lines.
        """
        points = self._by_shape.get(shape)
        if points is not None:
            return _read(points, kv_tokens)
        tokens, shapes = self._mixed if shape.prefill_blocks and self._mixed[0] else self._decode_only
        if not tokens:
            tokens, shapes = self._mixed
        seconds = [_read(self._by_shape[measured], kv_tokens) for measured in shapes]
        return _read((tokens, seconds), self._tokens(shape))

    @cached_property
    def shapes(self) -> tuple[StepShape, ...]:
        """What was measured, in the order in which a step looks for one: see `buckets.step_shapes`."""
        return tuple(sorted(self._by_shape, key=lambda shape: (shape.prefill_blocks, shape.decode_rows)))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError: the file cannot be read, or is no such table."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read the step times {path}: {error.strerror}") from None
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            place = ".".join(map(str, detail["loc"]))
            raise ConfigError(f"{path} holds no step times: {place or 'the file'}: {detail['msg']}") from None

    @cached_property
    def _by_shape(self) -> dict[StepShape, Points]:
        table: dict[StepShape, Points] = {}
        for step in sorted(self.steps, key=lambda step: step.kv_tokens):
            shape = StepShape(decode_rows=step.decode_rows, prefill_blocks=step.prefill_blocks)
            kv_tokens, seconds = table.setdefault(shape, ([], []))
            kv_tokens.append(step.kv_tokens)
            # Reading more keys is never faster; where a measurement says so it is noise.
            seconds.append(max([step.seconds, *seconds[-1:]]))
        return table

    @cached_property
    def _decode_only(self) -> tuple[list[float], list[StepShape]]:
        return self._by_tokens([shape for shape in self.shapes if not shape.prefill_blocks])

    @cached_property
    def _mixed(self) -> tuple[list[float], list[StepShape]]:
        return self._by_tokens([shape for shape in self.shapes if shape.prefill_blocks])

    def _by_tokens(self, shapes: list[StepShape]) -> tuple[list[float], list[StepShape]]:
        by_tokens = dict(sorted((self._tokens(shape), shape) for shape in shapes))
        return list(by_tokens), list(by_tokens.values())

    def _tokens(self, shape: StepShape) -> int:
        return shape.decode_rows + shape.prefill_blocks * self.block_q

    def _fit(self, decode_rows: int, prefill_blocks: int) -> StepShape:
        """A step that no measured shape holds is taken as it is: `of_shape` extends the table to it."""
        for shape in self.shapes:
            if shape.decode_rows >= decode_rows and shape.prefill_blocks >= prefill_blocks:
                return shape
        return StepShape(decode_rows=decode_rows, prefill_blocks=prefill_blocks)


def config_digest(config: EngineConfig) -> str:
    """A short name for everything in a resolved configuration that decides how long its steps take."""
    decisive = [
        config.model.model_dump(mode="json", exclude={"name"}),
        config.cache.page_size,
        config.cache.dtype,
        config.scheduler.max_num_seqs,
        config.execution.attention_backend,
        config.execution.block_q,
        config.execution.decode_buckets,
        config.execution.prefill_buckets,
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


def _read(points: tuple[Sequence[float], Sequence[float]], x: float) -> float:
    """y at x on the broken line through the points; its first and last pieces go on beyond, but never below zero."""
    xs, ys = points
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.0)
