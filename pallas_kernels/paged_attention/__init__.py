"""Attention over a paged KV cache."""

from pallas_kernels.paged_attention.api import AttentionRows, paged_attention

__all__ = ["AttentionRows", "paged_attention"]
