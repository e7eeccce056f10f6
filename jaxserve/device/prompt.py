"""One prompt by itself as a StepBatch, for whoever runs a model outside the engine; knows no request and no plan."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from models.step import StepBatch
from pallas_kernels.paged_attention import AttentionRows


def prompt_batch(
    token_ids: np.ndarray[Any, Any], padded: int, *, block_q: int, page_size: int, pages_per_seq: int
) -> StepBatch:
    """One sequence from its beginning, in the pages from 1 on; what is padded reads and writes page 0.

    Args:
      token_ids: int32[tokens].
      padded: tokens of the batch, a multiple of block_q.
    """
    count, positions = len(token_ids), np.arange(padded, dtype=np.int32)
    starts = np.arange(0, padded, block_q, dtype=np.int32)
    lengths = np.where(starts < count, np.minimum(starts + block_q, count), 0).astype(np.int32)
    none = np.zeros(0, np.int32)
    arrays = {
        "token_ids": np.pad(token_ids, (0, padded - count)),
        "positions": positions,
        "page_ids": np.where(positions < count, positions // page_size + 1, 0).astype(np.int32),
        "offsets": positions % page_size,
        "rope_lengths": np.full(padded, count, np.int32),
        "block_tables": np.arange(1, pages_per_seq + 1, dtype=np.int32)[None],
    }
    return StepBatch(
        **{name: jnp.asarray(array) for name, array in arrays.items()},
        decode=_rows(none, none),
        prefill=_rows(starts, lengths),
    )


def _rows(starts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> AttentionRows:
    return AttentionRows(
        tables=jnp.zeros(len(starts), jnp.int32), starts=jnp.asarray(starts), lengths=jnp.asarray(lengths)
    )
