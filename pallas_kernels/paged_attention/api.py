"""Paged attention's contract, and the choice of the backend that computes it."""

import dataclasses
import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

import jax
from jax import Array

from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention.shape import AttentionShape

log = logging.getLogger(__name__)

BackendName = Literal["tpu", "gpu_mosaic", "gpu_triton", "cpu", "xla"]

_PLATFORM: Mapping[BackendName, str | None] = {  # None: compiled for any; "auto" takes the first that can
    "tpu": "tpu",
    "gpu_mosaic": "gpu",
    "gpu_triton": "gpu",
    "cpu": "cpu",
    "xla": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Who computes attention. Static: it decides what is compiled.

    Attributes:
      interpret: simulate the kernel step by step, for a device that it was not made for. Slow, and exact.
    """

    name: BackendName
    interpret: bool = False


XLA = Backend(name="xla")


def choose_backend(
    requested: BackendName | Literal["auto"], shape: AttentionShape, *, library_folder: Path | None = None
) -> Backend:
    """The backend to compile with. "auto" takes the first that can serve the shape, and logs why others cannot.

    A kernel for TPU or GPU that is asked for by name on another device than its own is simulated.

    Args:
      library_folder: where `cpu` keeps what it has the machine's C compiler make; None: nowhere.

    Raises:
      ValueError: the backend asked for cannot serve the shape; says why.
    """
    if requested != "auto":
        reason = _objection(requested, shape, library_folder)
        if reason is not None:
            raise ValueError(f"{requested} cannot serve this model: {reason}")
        return Backend(name=requested, interpret=_PLATFORM[requested] not in (None, shape.platform))
    for name in candidates(requested, shape):
        reason = _objection(name, shape, library_folder)
        if reason is None:
            return Backend(name=name)
        log.warning("attention backend %s is passed over: %s", name, reason)
    raise AssertionError("xla serves every shape")


def _objection(name: BackendName, shape: AttentionShape, library_folder: Path | None) -> str | None:
    module = backend_module(name)
    reason: str | None = module.unsupported(shape)
    return module.prepare(library_folder) if reason is None and name == "cpu" else reason


def candidates(requested: BackendName | Literal["auto"], shape: AttentionShape) -> tuple[BackendName, ...]:
    """The backends that may compute the shape on its platform, the fastest first."""
    if requested != "auto":
        return (requested,)
    return tuple(name for name, platform in _PLATFORM.items() if platform in (None, shape.platform))


def backend_module(name: BackendName) -> ModuleType:
    """Imports the backend on its first use: Pallas for TPU and GPU is a third of a second that a CPU has no use for."""
    return import_module(f"pallas_kernels.paged_attention.{name}")


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
    kv: KVPages,
    block_tables: Array,
    rows: AttentionRows,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    backend: Backend = XLA,
) -> Array:
    """Causal attention of each row's queries over its sequence's pages (PagedAttention, Kwon et al. 2023).

    A query at position p sees the keys at positions j <= p, and j > p - sliding_window if there is a window.

    Args:
      q: [rows, queries, heads, head_dim]. Queries past a row's length are padding; what they return is meaningless.
      kv: the pages, this step's keys and values already written. Query head h reads KV head h // (heads / kv_heads).
      block_tables: int32[tables, pages_per_sequence]. Entries past a sequence's last page may hold any valid page id.
      rows: which sequence each row belongs to, and where it stands in it.
      scale: multiplies the scores.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap), before the mask (Gemma 2).
      sinks: [heads], a logit for each head that takes part in the softmax and has no value (Xiao et al. 2024; gpt-oss).

    Returns:
      [rows, queries, heads, head_dim], q's dtype.
    """
    module = backend_module(backend.name)
    simulation = {"interpret": backend.interpret} if _PLATFORM[backend.name] in ("tpu", "gpu") else {}
    out: Array = module.paged_attention(
        q,
        kv,
        block_tables,
        rows.tables,
        rows.starts,
        rows.lengths,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        **simulation,
    )
    return out
