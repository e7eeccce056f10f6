"""The arrays of one step: what a model's forward pass is given, and the KV pages that it updates."""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from models.config import ModelConfig
from pallas_kernels.paged_attention import AttentionRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVPool:
    """Keys and values of every page. Page 0 is a dummy that padding reads and writes.

    Attributes:
      layers: one [pages, kv_heads, page_size, 2 * head_dim] array a layer, so that each is updated in place by itself.
        A token's key and value lie side by side: one copy brings both, and 64-wide heads fill a TPU's 128 lanes.
    """

    layers: tuple[Array, ...]

    @staticmethod
    def shapes(config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> "KVPool":
        """The pool as ShapeDtypeStructs: for compiling before any memory is taken."""
        pages = jax.ShapeDtypeStruct((num_pages, config.num_kv_heads, page_size, 2 * config.head_dim), dtype)
        return KVPool(layers=cast("tuple[Array, ...]", (pages,) * config.num_layers))

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
        """Bytes that one page takes over all layers, keys and values together."""
        per_layer = math.prod((2, config.num_kv_heads, page_size, config.head_dim)) * jnp.dtype(dtype).itemsize
        return per_layer * config.num_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One step's tokens: first the decode rows (one token each), then the prefill blocks (`block_q` tokens each).

    Linear layers see one [tokens, hidden] matrix, attention works per region (selective batching; Yu et al. 2022).

    Attributes:
      token_ids, positions: int32[tokens].
      page_ids, offsets: int32[tokens], where each token's keys and values go; page 0 for padding.
      rope_lengths: int32[tokens], the most positions that the token's sequence may ever hold. Only `dynamic` RoPE reads
        it: the frequencies of a sequence follow from it and never change, so neither chunking, preemption nor
        neighbours can change a result.
      block_tables: int32[tables, pages_per_sequence].
      decode, prefill: the two regions' rows.
    """

    token_ids: Array
    positions: Array
    page_ids: Array
    offsets: Array
    rope_lengths: Array
    block_tables: Array
    decode: AttentionRows
    prefill: AttentionRows
