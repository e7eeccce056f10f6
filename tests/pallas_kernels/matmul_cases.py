"""The products with 4-bit matrices that tests simulate and benchmarks/gpu checks on a device, and what float64 says."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulCase:
    name: str
    tokens: int
    outputs: int
    inputs: int
    group: int
    has_zeros: bool = True
    dtype: Literal["bfloat16", "float16"] = "bfloat16"


_KINDS = (  # tiles of 64 and of 128 outputs, groups below, at and above a step's inputs
    MatmulCase(name="one token, groups of 32", tokens=1, outputs=128, inputs=256, group=32),
    MatmulCase(name="steps of 64, three tiles, float16", tokens=5, outputs=192, inputs=576, group=64, dtype="float16"),
    MatmulCase(name="groups of 128, programs with unequal shares", tokens=17, outputs=128, inputs=640, group=128),
    MatmulCase(name="groups of three steps", tokens=3, outputs=64, inputs=768, group=384),
    MatmulCase(name="two tiles of tokens, groups of 16", tokens=140, outputs=128, inputs=256, group=16),
)
MOST_ERROR = 0.25  # of the bound: among so many, roundings cancel
CASES = (*_KINDS, MatmulCase(name="no zeros", tokens=4, outputs=64, inputs=128, group=32, has_zeros=False))


def make_inputs(case: MatmulCase) -> tuple[Array, Array, Array, Array | None]:
    """x, codes, scales, zeros: as the kernel takes them."""
    rng = np.random.default_rng(case.tokens)
    groups = (case.outputs, case.inputs // case.group)
    x = jnp.asarray(rng.normal(size=(case.tokens, case.inputs)), case.dtype)
    codes = jnp.asarray(rng.integers(-8, 8, (case.outputs, case.inputs)), jnp.int4)
    scales = jnp.asarray(rng.uniform(0.5, 2, groups) / 16, case.dtype)
    zeros = jnp.asarray(rng.normal(size=groups) * 5, case.dtype) if case.has_zeros else None
    return x, codes, scales, zeros


def error_over_bound(case: MatmulCase, out: Any) -> float:
    """The largest error, as a share of what roundings come to if none cancels another."""
    x, codes, scales, zeros = make_inputs(case)
    wide_scales = np.asarray(scales, np.float64)[:, :, None]
    wide_zeros = np.zeros_like(wide_scales) if zeros is None else np.asarray(zeros, np.float64)[:, :, None]
    grouped = np.asarray(codes.astype(jnp.int8), np.float64).reshape(case.outputs, -1, case.group)
    weights = ((grouped - wide_zeros) * wide_scales).reshape(codes.shape)
    terms = ((np.abs(grouped) + np.abs(wide_zeros)) * wide_scales).reshape(codes.shape)
    expected = np.asarray(x, np.float64) @ weights.T
    # A weight is rounded three times, each of its terms' size at most, and the product once.
    rounding = float(jnp.finfo(case.dtype).eps) / 2
    bound = rounding * (3 * np.abs(np.asarray(x, np.float64)) @ terms.T + np.abs(expected)) + 1e-4
    return float((np.abs(np.asarray(out, np.float64) - expected) / bound).max())
