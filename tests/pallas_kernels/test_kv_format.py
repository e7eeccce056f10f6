"""Narrow formats against their float64 description, and what each promises of its error."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kv_format_reference import (
    LARGEST,
    NARROW,
    NUMBERS,
    HostArray,
    Quantized,
    dequantized,
    quantized,
    rounded_up,
    with_scales,
)

from pallas_kernels.kv_dtype import KVDtype, token_bytes
from pallas_kernels.kv_format import KVPages, pack, quantize, scale_of, unpack


def stored(x: HostArray, dtype: KVDtype) -> Quantized:
    codes, scales = jax.jit(quantize, static_argnums=1)(jnp.asarray(x, jnp.float32), dtype)
    assert codes.dtype == jnp.int8
    assert scales.dtype == jnp.int16
    return Quantized(codes=np.asarray(codes), scales=np.asarray(scales))


def vectors(*shape: int) -> HostArray:
    """Normal numbers of magnitudes from a millionth to a million."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-6, 6, (*shape[:-1], 1))).astype(np.float32)


@pytest.mark.parametrize("dtype", NARROW)
def test_codes_and_scales_are_the_references(dtype: KVDtype) -> None:
    x = vectors(500, 64)
    ours, expected = stored(x, dtype), quantized(x, dtype)
    np.testing.assert_array_equal(ours.scales, expected.scales)
    # x / scale may round to the middle between two codes, and then either is as near.
    assert (ours.codes != expected.codes).mean() < 1e-3
    np.testing.assert_allclose(
        np.abs(dequantized(ours, dtype) - x), np.abs(dequantized(expected, dtype) - x), rtol=1e-3, atol=1e-12
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_pages_give_back_what_the_codes_and_scales_mean(dtype: KVDtype) -> None:
    x = vectors(2, 7, 3, 16)
    k, v = (stored(half, dtype) for half in x)
    data = pack(jnp.asarray(k.codes), jnp.asarray(v.codes), dtype)
    shapes = KVPages.shapes(7, 1, 3, 16, dtype)
    assert data.shape[-1] == shapes.data.shape[-1]
    assert shapes.head_dim == 16
    for half, codes in zip((k, v), unpack(data, dtype), strict=True):
        numbers = np.asarray(codes * scale_of(jnp.asarray(half.scales))[..., None])
        np.testing.assert_array_equal(numbers, dequantized(half, dtype))


@pytest.mark.parametrize(("dtype", "gain"), [("int4", 0.97), ("fp8_e5m2", 0.95)])
def test_few_digits_take_another_scale_where_that_lessens_the_error(dtype: KVDtype, gain: float) -> None:
    x = vectors(200, 64)
    ours = stored(x, dtype)
    whole = with_scales(x, rounded_up(np.abs(x).max(-1).astype(np.float64) / LARGEST[dtype]), dtype)
    errors, wholes = (np.linalg.norm(dequantized(s, dtype) - x, axis=-1) for s in (ours, whole))
    assert (errors <= wholes * (1 + 1e-6)).all()
    assert (errors / wholes).mean() < gain
    assert (ours.scales != whole.scales).mean() > 0.5


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if dtype != "int4"])
def test_nothing_saturates_and_one_channel_costs_the_others_no_more_than_its_steps(dtype: KVDtype) -> None:
    x = vectors(200, 64)
    x[:, 5] *= 1000
    half_step = np.abs(x).max(-1, keepdims=True) * half_steps(dtype, np.abs(x) / np.abs(x).max(-1, keepdims=True))
    assert (np.abs(dequantized(stored(x, dtype), dtype) - x) <= half_step).all()


def half_steps(dtype: KVDtype, x: HostArray) -> HostArray:
    """Half the distance between the numbers around x, which lies in 0..1, 1 being the largest of its vector.

    The scale is rounded up by less than one part in 128, and with it every step. fp8_e5m2's may be 7/4 of that.
    """
    if dtype == "fp8_e5m2":  # 1.125 becomes 1 or 1.25
        return np.maximum(x / 9 * (1 + 1e-6), 2.0**-17 * 7 / 4 * (1 + 2**-7) / LARGEST[dtype])
    numbers = np.unique(NUMBERS[dtype][NUMBERS[dtype] >= 0]) / LARGEST[dtype]
    steps = np.diff(numbers[numbers <= 1], prepend=0)
    # Rounded up, a scale may move x to the finer steps below, never to the coarser ones above.
    place = np.minimum(np.searchsorted(numbers, x * (1 - 1e-6)), len(steps) - 1)
    return np.asarray(steps[place] * 0.5 * (1 + 2**-7) * (1 + 1e-6))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("magnitude", [0.01, 1.0, 100.0])
def test_the_error_is_relative(dtype: KVDtype, magnitude: float) -> None:
    x = np.random.default_rng(2).standard_normal((100, 64)).astype(np.float32)
    once, scaled = (dequantized(stored(x * factor, dtype), dtype) for factor in (1.0, magnitude))
    error = np.linalg.norm(scaled / magnitude - x) / np.linalg.norm(x)
    assert error == pytest.approx(np.linalg.norm(once - x) / np.linalg.norm(x), rel=0.05)
    assert error < {"int8": 0.008, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "int4": 0.12}[dtype]


@pytest.mark.parametrize("dtype", NARROW)
def test_zeros_stay_zeros(dtype: KVDtype) -> None:
    zeros = stored(np.zeros((3, 16), np.float32), dtype)
    np.testing.assert_array_equal(zeros.scales, 0)
    np.testing.assert_array_equal(dequantized(zeros, dtype), 0)


@pytest.mark.parametrize("dtype", NARROW)
def test_infinities_saturate_and_nan_spoils_its_own_token_alone(dtype: KVDtype) -> None:
    x = vectors(4, 16)
    clean = stored(x, dtype)
    x[1, 3], x[2, 4], x[2, 5] = np.inf, -np.inf, np.inf
    x[3, 0] = np.nan
    seen = stored(x, dtype)
    np.testing.assert_array_equal(seen.scales[0], clean.scales[0])
    np.testing.assert_array_equal(seen.codes[0], clean.codes[0])
    numbers = dequantized(seen, dtype)
    assert np.isfinite(numbers[:3]).all()
    np.testing.assert_allclose(
        [numbers[1, 3], -numbers[2, 4], numbers[2, 5]], 3e38, rtol=0.21 if dtype == "int4" else 0.01
    )
    assert np.isnan(seen.scales.view(ml_dtypes.bfloat16)[3])


@pytest.mark.parametrize("dtype", NARROW)
def test_the_bytes_of_a_token_are_those_of_its_arrays(dtype: KVDtype) -> None:
    pages = KVPages.shapes(5, 3, 16, 64, dtype)
    assert pages.scales is not None
    arrays = (pages.data, pages.scales)
    assert sum(a.size * a.dtype.itemsize for a in arrays) == 5 * 16 * token_bytes(3, 64, dtype)
    # A head of 64 numbers: 1.9 times the tokens of bfloat16 in the same memory with 8 bits, 3.7 times with 4.
    assert token_bytes(3, 64, "bfloat16") / token_bytes(3, 64, dtype) > (3.7 if dtype == "int4" else 1.9)
