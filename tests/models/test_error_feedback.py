"""Rounding with feedback: what a matrix computes on correlated inputs changes several times less than by nearest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import WeightFormat
from models.error_feedback import DAMPING, quantize_with_feedback
from models.quantization import QuantizedMatrix, dequantize, quantize

OUT, IN, GROUPS = 48, 160, 5  # 160: in blocks of 32, as no more divide it

fit = jax.jit(quantize_with_feedback, static_argnums=(2, 3, 4))


def inputs(rng: np.random.Generator, count: int) -> np.ndarray:
    """Of a few directions mostly, and of very different sizes."""
    mixing = np.random.default_rng(0).normal(size=(IN // 4, IN)) * np.geomspace(0.01, 3, IN)
    return (rng.normal(size=(count, IN // 4)) @ mixing + 0.1 * rng.normal(size=(count, IN))).astype(np.float32)


@pytest.mark.parametrize(("format", "groups"), [("int8", 1), ("fp8_e4m3", 1), ("int4", GROUPS)])
def test_products_on_unseen_inputs_are_closer_than_with_nearest_codes(format: WeightFormat, groups: int) -> None:
    rng = np.random.default_rng(1)
    weight, seen, unseen = rng.normal(size=(OUT, IN)).astype(np.float32), inputs(rng, 600), inputs(rng, 200)
    fitted = fit(jnp.asarray(weight), jnp.asarray(seen.T @ seen), format, groups, jnp.float32)
    nearest = quantize(jnp.asarray(weight), format, groups, jnp.float32)
    assert (fitted.codes.dtype, fitted.scales.shape) == (nearest.codes.dtype, nearest.scales.shape)

    def error(matrix: QuantizedMatrix) -> float:
        difference = np.asarray(dequantize(matrix, jnp.float32), np.float64) - weight
        return float(((unseen @ difference.T) ** 2).mean())

    assert error(fitted) < 0.4 * error(nearest)


def test_inputs_that_never_occurred_are_rounded_to_their_nearest_codes() -> None:
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(OUT, IN)).astype(np.float32)
    fitted = fit(jnp.asarray(weight), jnp.zeros((IN, IN)), "int8", 1, jnp.float32)
    assert np.abs(np.asarray(dequantize(fitted, jnp.float32)) - weight).max() <= np.abs(weight).max() / 127


def test_scales_and_zero_points_of_4_bits_are_those_of_least_error_for_their_codes() -> None:
    rng = np.random.default_rng(3)
    weight, seen = rng.normal(size=(OUT, IN)), inputs(rng, 600).astype(np.float64)
    matrix = fit(jnp.asarray(weight, jnp.float32), jnp.asarray(seen.T @ seen, jnp.float32), "int4", GROUPS, jnp.float32)
    assert matrix.zeros is not None
    codes = np.asarray(matrix.codes.astype(jnp.int32), np.float64)
    # The damping that `moments` got, as inputs of its own.
    damped = np.concatenate([seen, np.eye(IN) * np.sqrt(DAMPING * np.square(seen).sum(axis=0).mean())])
    for row in range(8):
        by_group = np.zeros((IN, GROUPS, 2))
        for group in range(GROUPS):
            at = slice(group * IN // GROUPS, (group + 1) * IN // GROUPS)
            by_group[at, group, 0], by_group[at, group, 1] = codes[row, at], 1
        best, *_ = np.linalg.lstsq(damped @ by_group.reshape(IN, -1), damped @ weight[row], rcond=None)
        scales, shifts = best.reshape(GROUPS, 2).T
        np.testing.assert_allclose(matrix.scales[row], scales, rtol=0.02)
        np.testing.assert_allclose(matrix.zeros[row], -shifts / scales, atol=0.1)
