"""Paged attention's contract, and the choice of the backend that computes it."""

import dataclasses
from typing import Literal

import jax
from jax import Array

from pallas_kernels.paged_attention import xla

Backend = Literal["xla"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRows:
    """The rows of one region of a step: each is a run of consecutive query tokens of one sequence.

    Attributes:
      tables: int32[rows], the row of the block table that holds this sequence's pages.
      starts: int32[rows], the position of the row's first query.
      lengths: int32[rows], keys in the cache once this row's own are written: the position after its last real query.
        0 marks a padding row: it reads nothing, and its output is zero.
    """

    tables: Array
    starts: Array
    lengths: Array


def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    rows: AttentionRows,
    *,
    scale: float,
    sliding_window: int | None = None,
    backend: Backend = "xla",
) -> Array:
    """Causal attention of each row's queries over its sequence's pages (PagedAttention, Kwon et al. 2023).

    A query at position p sees the keys at positions j <= p, and j > p - sliding_window if there is a window.

    Args:
      q: [rows, queries, heads, head_dim]. Queries past a row's length are padding; what they return is meaningless.
      k_pages, v_pages: [pages, kv_heads, page_size, head_dim], this step's keys and values already written.
        Query head h reads KV head h // (heads / kv_heads).
      block_tables: int32[tables, pages_per_sequence]. Entries past a sequence's last page may hold any valid page id.
      rows: which sequence each row belongs to, and where it stands in it.
      scale: multiplies the scores.

    Returns:
      [rows, queries, heads, head_dim], q's dtype.
    """
    assert backend == "xla", backend
    return xla.paged_attention(
        q,
        k_pages,
        v_pages,
        block_tables,
        rows.tables,
        rows.starts,
        rows.lengths,
        scale=scale,
        sliding_window=sliding_window,
    )
