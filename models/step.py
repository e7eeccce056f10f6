"""The arrays of one step: what a model's forward pass is given, and the KV pages that it updates."""

import dataclasses

import jax
from jax import Array

from models.config import ModelConfig
from pallas_kernels.kv_dtype import KVDtype, token_bytes
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import AttentionRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVPool:
    """Keys and values of every page. Page 0 is a dummy that padding reads and writes.

    Attributes:
      layers: pages of their own for each layer, so that each is updated in place by itself.
    """

    layers: tuple[KVPages, ...]

    @staticmethod
    def shapes(config: ModelConfig, num_pages: int, page_size: int, dtype: KVDtype) -> "KVPool":
        """The pool as ShapeDtypeStructs: for compiling before any memory is taken."""
        pages = KVPages.shapes(num_pages, config.num_kv_heads, page_size, config.head_dim, dtype)
        return KVPool(layers=(pages,) * config.num_layers)

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: KVDtype) -> int:
        """Bytes that one page takes over all layers, keys, values and scales together."""
        return page_size * token_bytes(config.num_kv_heads, config.head_dim, dtype) * config.num_layers


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
