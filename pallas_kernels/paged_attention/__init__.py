"""Attention over a paged KV cache."""

from pallas_kernels.paged_attention.api import (
    XLA,
    AttentionRows,
    Backend,
    BackendName,
    backend_module,
    candidates,
    choose_backend,
    paged_attention,
)
from pallas_kernels.paged_attention.shape import AttentionShape

__all__ = [
    "XLA",
    "AttentionRows",
    "AttentionShape",
    "Backend",
    "BackendName",
    "backend_module",
    "candidates",
    "choose_backend",
    "paged_attention",
]
