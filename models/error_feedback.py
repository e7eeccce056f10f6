"""Rounds a matrix so that what it computes changes least: each input's rounding error is made up for by later inputs.

GPTQ (Frantar et al. 2023, https://arxiv.org/abs/2210.17323): with X the inputs seen on some text, the squared error of
the products is (W - Q) XᵀX (W - Q)ᵀ. One input after the other is rounded, and what that changes in the products is
taken back, as far as it goes, by the inputs that are not rounded yet. Knows arrays; who collects XᵀX is above.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from models.config import WeightFormat
from models.quantization import CODE_DTYPES, QuantizedMatrix, encode, quantize

BLOCK_INPUTS = 64  # rounded before the rest of the matrix hears of it, in one product
DAMPING = 0.01  # of the mean second moment, added to each: inputs that the text hardly used are trusted little
SMALLEST = 1e-30  # added too, for a text of zeros


def quantize_with_feedback(
    weight: Array, moments: Array, format: WeightFormat, groups: int, dtype: Any
) -> QuantizedMatrix:
    """Codes with the least error in the products; scales and zero points are `quantize`'s, by each input's own moment.

    Inputs are rounded from the largest moment to the smallest: the last ones have nobody left to make up for them. The
    groups stay where they are, so that the order leaves no trace in what is stored.

    Args:
      weight: [out, in].
      moments: float32[in, in], the sum of x xᵀ over inputs x.
      dtype: of the scales.
    """
    with jax.default_matmul_precision("highest"):
        return _rounded(weight.astype(jnp.float32), moments, format, groups, dtype)


def _rounded(weight: Array, moments: Array, format: WeightFormat, groups: int, dtype: Any) -> QuantizedMatrix:
    features_out, features_in = weight.shape
    own = jnp.diagonal(moments)
    damping = DAMPING * own.mean() + SMALLEST
    plain = quantize(weight, format, groups, dtype, own + damping)
    order = jnp.argsort(-own)
    damped = (moments + damping * jnp.eye(features_in))[order][:, order]
    feedback = _inverse_factor(damped)

    def by_input(of_groups: Array) -> Array:
        return of_groups.T.repeat(features_in // groups, axis=0)[order]

    scales = by_input(plain.scales)
    zeros = None if plain.zeros is None else by_input(plain.zeros)
    block = math.gcd(features_in, BLOCK_INPUTS)

    def round_block(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        remaining, codes = state
        start = number * block

        def part(array: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(array, start, block)

        factors = part(feedback)
        inner = jax.lax.dynamic_slice_in_dim(factors, start, block, axis=1)
        block_scales, block_zeros = part(scales), None if zeros is None else part(zeros)

        def round_input(i: Array, inside: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            wide, block_codes, errors = inside
            zero = None if block_zeros is None else block_zeros[i]
            code = encode(wide[i], block_scales[i], zero, format)
            shift = 0.0 if zero is None else zero.astype(jnp.float32)
            error = (wide[i] - (code - shift) * block_scales[i].astype(jnp.float32)) / inner[i, i]
            wide = wide - inner[i][:, None] * error
            return wide, block_codes.at[i].set(code), errors.at[i].set(error)

        nothing = jnp.zeros((block, features_out))
        _, block_codes, errors = jax.lax.fori_loop(0, block, round_input, (part(remaining), nothing, nothing))
        # Inputs before the block have factors of zero; those in it are not read again.
        remaining = remaining - factors.T @ errors
        return remaining, jax.lax.dynamic_update_slice_in_dim(codes, block_codes, start, axis=0)

    state = weight.T[order], jnp.zeros((features_in, features_out))
    _, codes = jax.lax.fori_loop(0, features_in // block, round_block, state)
    in_place = codes[jnp.argsort(order)].T
    return QuantizedMatrix(codes=in_place.astype(CODE_DTYPES[format]), scales=plain.scales, zeros=plain.zeros)


def _inverse_factor(matrix: Array) -> Array:
    """Upper triangular U with UᵀU the inverse of a positive definite matrix."""
    # Reversed, Cholesky's lower factor is an upper one R with R Rᵀ the matrix; U is its inverse.
    upper = jnp.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
    return solve_triangular(upper, jnp.eye(matrix.shape[0]), lower=False)
