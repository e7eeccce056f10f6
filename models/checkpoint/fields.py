"""Checked reads of a checkpoint's configuration values; knows the types, not what a key means."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from models.config import RopeConfig
from models.errors import CheckpointError

# The widest count we accept. Every array's dimensions then fit int64 products with room to spare.
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """The key-value part of a checkpoint, read with errors that name the source and the key.

    Attributes:
      source: the file (and section) the values came from, for messages.
      values: key to value, as JSON or GGUF gave them. A null counts as absent.
    """

    source: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {key} is {_shown(self.values.get(key))}; {problem}")

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """What a configuration's own checks refuse inside the `with` becomes an error of this source."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {error}") from None

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.source}: {key} is missing")
        return default

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            raise self.error(key, f"it must be an integer from 1 to {MAX_COUNT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "it must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.error(key, "it must be a positive, finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "it must be a string")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, or a list of them, or nothing; every id lies in the vocabulary."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise self.error(key, f"token ids are integers from 0 to {vocab_size - 1}")
        return tuple(ids)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def attention_shape(
    fields: Fields, *, hidden_size: int, heads_key: str, kv_heads_key: str, head_dim_key: str, default_kv_heads: int = 0
) -> tuple[int, int, int]:
    """Reads (heads, K/V heads, head_dim) and checks that they fit each other.

    Args:
      default_kv_heads: where the K/V key is absent; 0 means as many as heads.
    """
    heads = fields.count(heads_key)
    kv_heads = fields.count(kv_heads_key, default_kv_heads or heads)
    if heads % kv_heads:
        raise fields.error(kv_heads_key, f"it must divide {heads_key}, {heads}")
    if not fields.has(head_dim_key) and hidden_size % heads:
        raise fields.error(
            head_dim_key, f"it is needed, for {heads_key} {heads} does not divide the width {hidden_size}"
        )
    head_dim = fields.count(head_dim_key, hidden_size // heads)
    if head_dim % 2:
        raise fields.error(head_dim_key, f"rotary pairs need an even head width, not {head_dim}")
    return heads, kv_heads, head_dim


def longest_context(rope: RopeConfig, declared: int) -> int:
    """Tokens that a model can attend over, from the context that its checkpoint declares and the stretching rule.

    Of `linear` and `dynamic` models the declared context is the trained one, of the others often the stretched one.
    """
    if rope.kind in ("linear", "dynamic"):
        return int(min(declared * rope.factor, MAX_COUNT))
    if rope.kind == "yarn":
        return int(min(max(declared, rope.original_max_position * rope.factor), MAX_COUNT))
    return declared
