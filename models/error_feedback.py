"""Rounds a matrix so that what it computes changes least: each input's rounding error is made up for by later inputs.

GPTQ (Frantar et al. 2023, https://arxiv.org/abs/2210.17323): with X the inputs seen on some text, the squared error of
the products is (W - Q) XᵀX (W - Q)ᵀ. One input after the other is rounded, and what that changes in the products is
taken back, as far as it goes, by the inputs that are not rounded yet. For codes that stand, in turn, scales and zero
points of least error are found; so both are done several times. Knows arrays; who collects XᵀX is above.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from models.config import WeightFormat
from models.quantization import CODE_DTYPES, QuantizedMatrix, encode, quantize

BLOCK_INPUTS = 64  # rounded before the rest of the matrix hears of it, in one product
DAMPING = 0.1  # of the mean second moment, added to each: inputs that the text hardly used are trusted little
SMALLEST = 1e-30  # added too, for a text of zeros
TURNS = 3  # of codes, and scales and zero points for them: each takes a few percent of the error away
REFIT_DAMPING = 1e-4  # of what each scale and zero point weighs: where codes say little about them they stay
BLOCK_OUTPUTS = 64  # whose scales are refitted at a time


def quantize_with_feedback(
    weight: Array, moments: Array, format: WeightFormat, groups: int, dtype: Any
) -> QuantizedMatrix:
    """Codes with little error in the products. Scales are `quantize`'s, by each input's own moment; those of int4 and
    its zero points are then fitted to the codes, and codes found for those, several times.

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
    own = jnp.diagonal(moments)
    damping = DAMPING * own.mean() + SMALLEST
    plain = quantize(weight, format, groups, dtype, own + damping)
    order = jnp.argsort(-own)
    damped = moments + damping * jnp.eye(len(own))
    feedback = _inverse_factor(damped[order][:, order])
    rounded = partial(_codes, weight, format=format, order=order, feedback=feedback)
    if plain.zeros is None:
        codes, scales, zeros = rounded(plain.scales, None), plain.scales, None
    else:

        def turn(_: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            codes = rounded(state[1], state[2])
            return codes, *_refitted(weight, damped, codes, state[1], state[2])

        start = jnp.zeros(weight.shape), plain.scales, plain.zeros
        codes, scales, zeros = jax.lax.fori_loop(0, TURNS, turn, start)
    return QuantizedMatrix(codes=codes.astype(CODE_DTYPES[format]), scales=scales, zeros=zeros)


def _codes(
    weight: Array, scales: Array, zeros: Array | None, format: WeightFormat, order: Array, feedback: Array
) -> Array:
    """[out, in], as float32: rounded in the order of inputs, each error handed on by a row of `feedback`."""
    features_out, features_in = weight.shape
    groups = scales.shape[1]

    def by_input(of_groups: Array) -> Array:
        return of_groups.T.repeat(features_in // groups, axis=0)[order]

    scales = by_input(scales)
    zeros = None if zeros is None else by_input(zeros)
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
    return codes[jnp.argsort(order)].T


def _refitted(weight: Array, moments: Array, codes: Array, scales: Array, zeros: Array) -> tuple[Array, Array]:
    """Scales and zero points with the least error of the products for these codes, each [out, groups].

    A group's weights are scale * code + shift, with shift = -scale * zero: of each output, its scales and shifts solve
    linear equations, 2 * groups of them.
    """
    groups = scales.shape[1]
    by_group = moments.reshape(groups, -1, groups, moments.shape[0] // groups)
    of_shifts = by_group.sum((1, 3))

    def solve(row: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        wide, steps, scale, zero = row  # [in], [groups, in / groups], [groups], [groups]
        coded = jnp.einsum("gi,gihj->ghj", steps, by_group)
        corner = coded.sum(2)
        left = jnp.block([[jnp.einsum("ghj,hj->gh", coded, steps), corner], [corner.T, of_shifts]])
        wanted = (moments @ wide).reshape(groups, -1)
        right = jnp.concatenate([(wanted * steps).sum(1), wanted.sum(1)])
        pull = REFIT_DAMPING * jnp.diagonal(left)
        right += pull * jnp.concatenate([scale, -scale * zero])
        fitted, shift = jnp.split(jnp.linalg.solve(left + jnp.diag(pull + SMALLEST), right), 2)
        is_found = fitted > scale / 4  # a group of one code, or of inputs that never occurred, has none of its own
        return jnp.where(is_found, fitted, scale), jnp.where(is_found, -shift / jnp.where(is_found, fitted, 1), zero)

    wide_scales, wide_zeros = scales.astype(jnp.float32), zeros.astype(jnp.float32)
    rows = weight, codes.reshape(*scales.shape, -1), wide_scales, wide_zeros
    fitted, shifted = jax.lax.map(solve, rows, batch_size=BLOCK_OUTPUTS)
    return fitted.astype(scales.dtype), shifted.astype(zeros.dtype)


def _inverse_factor(matrix: Array) -> Array:
    """Upper triangular U with UᵀU the inverse of a positive definite matrix."""
    # Reversed, Cholesky's lower factor is an upper one R with R Rᵀ the matrix; U is its inverse.
    upper = jnp.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]
    return solve_triangular(upper, jnp.eye(matrix.shape[0]), lower=False)
