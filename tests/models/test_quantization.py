"""Quantized matrices against numpy in float64: the rounding, the products of every format, and what is refused."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from models import quantization
from models.config import ModelConfig, Quantization, WeightFormat
from models.errors import UnsupportedModelError
from models.quantization import QuantizedMatrix, check_groups, dequantize, quantize, quantized_matmul

OUT, IN = 96, 256
FORMATS: dict[WeightFormat, int] = {"int8": 1, "fp8_e4m3": 1, "int4": 4}  # and groups a row


def weight(seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, one all zero, one whose weights are all positive."""
    values = np.random.default_rng(seed).normal(size=(OUT, IN)) * np.geomspace(1e-4, 10, OUT)[:, None]
    values[3], values[5] = 0.0, np.abs(values[5])
    return values.astype(np.float32)


def widened(matrix: QuantizedMatrix) -> np.ndarray:
    """By the format's own words, in float64."""
    codes = np.asarray(matrix.codes.astype(jnp.float32), np.float64)
    groups = codes.reshape(*matrix.scales.shape, -1)
    zeros = 0.0 if matrix.zeros is None else np.asarray(matrix.zeros, np.float64)[..., None]
    return ((groups - zeros) * np.asarray(matrix.scales, np.float64)[..., None]).reshape(codes.shape)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_weight_is_within_half_a_step_of_its_code(format: WeightFormat, dtype: Any) -> None:
    matrix = quantize(jnp.asarray(weight()), format, FORMATS[format], dtype)
    error = np.abs(widened(matrix) - weight()).reshape(OUT, FORMATS[format], -1)
    steps = np.asarray(matrix.scales, np.float64)[..., None]
    if format == "fp8_e4m3":  # three bits of fraction: half a step is a sixteenth; below 2^-6 the step stays
        bound = np.maximum(np.abs(weight()).reshape(error.shape) / 16, steps * 2.0**-10)
    else:
        # int4 may let its outermost weights saturate where all others gain: no more than the range that it gave up.
        bound = steps * (0.5 if format == "int8" else 0.5 + 0.3 / 0.7 * 15 / 2)
    slack = 1.0 if dtype == jnp.float32 else 1.0 + 2.0**-7 * 127  # the largest may fall beyond a scale rounded down
    assert (error <= bound * slack + 1e-9).all()
    assert (widened(matrix)[3] == 0).all()


def test_int4_loses_less_than_the_plain_range_would() -> None:
    values = np.random.default_rng(1).standard_t(4, size=(64, 512)).astype(np.float32)
    ours = ((widened(quantize(jnp.asarray(values), "int4", 8, jnp.float32)) - values) ** 2).mean()
    groups = values.reshape(64, 8, -1).astype(np.float64)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    step = (high - low) / 15
    plain = ((np.round((groups - low) / step) * step + low - groups) ** 2).mean()
    assert ours < 0.98 * plain


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_is_that_of_the_widened_matrix(format: WeightFormat, rows: int) -> None:
    matrix = quantize(jnp.asarray(weight()), format, FORMATS[format], jnp.float32)
    x = np.random.default_rng(2).normal(size=(rows, IN)).astype(np.float32)
    expected = x.astype(np.float64) @ widened(matrix).T
    size = np.abs(x) @ np.abs(widened(matrix)).T
    for product in (quantized_matmul, jax.jit(quantized_matmul)):
        assert (np.abs(np.asarray(product(jnp.asarray(x), matrix)) - expected) <= 1e-5 * size + 1e-9).all()
    np.testing.assert_allclose(np.asarray(dequantize(matrix, jnp.float32)), widened(matrix), rtol=1e-6)


def test_the_product_of_large_matrices_is_the_same() -> None:
    values = np.random.default_rng(3).normal(size=(1536, 576)).astype(np.float32)  # more than one block of the CPU's
    for format, groups in (("int8", 1), ("int4", 9), ("fp8_e4m3", 1)):
        matrix = quantize(jnp.asarray(values), format, groups, jnp.float32)  # type: ignore[arg-type]
        x = np.random.default_rng(4).normal(size=(3, 576)).astype(np.float32)
        out = np.asarray(jax.jit(quantized_matmul)(jnp.asarray(x), matrix))
        expected = x @ widened(matrix).T.astype(np.float32)
        # int8: an activation has two digits, the lower one of half a step's 254th parts.
        digit = np.abs(x).max(axis=1, keepdims=True) / 127 / 254 / 2 if format == "int8" else 0.0
        assert (np.abs(out - expected) <= digit * np.abs(widened(matrix)).sum(axis=1) + 2e-4).all()


def test_groups_that_do_not_divide_are_refused_with_those_that_would() -> None:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=64, hidden_size=576, intermediate_size=1536, num_layers=1,
        num_heads=9, num_kv_heads=3, head_dim=64, max_position=64,
        quantization=Quantization(format="int4", group_size=128, has_zeros=True),
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"groups of 128 .* the 576 inputs .*q_proj.*; 64, 32, 16 would"):
        check_groups(model, 1)
    assert model.quantization is not None
    check_groups(dataclasses.replace(model, quantization=dataclasses.replace(model.quantization, group_size=64)), 1)


def test_a_token_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    matrix = quantize(jnp.asarray(weight()), "int8", 1, jnp.float32)
    x = np.random.default_rng(5).normal(size=(3, IN)).astype(np.float32)
    alone = np.asarray(quantized_matmul(jnp.asarray(x), matrix))
    x[1, 4] = np.nan
    out = np.asarray(quantized_matmul(jnp.asarray(x), matrix))
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], alone[[0, 2]])


def test_groups_in_turns_as_on_tpu_give_the_product_of_the_widened_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "TPU_BLOCK_WEIGHTS", 1024)
    rng = np.random.default_rng(3)
    x, weight = (jnp.asarray(rng.standard_normal((rows, 256)), jnp.float32) for rows in (5, 96))
    matrix = quantization.quantize(weight, "int4", 8, jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(quantization.dequantize(matrix, jnp.float32), np.float64).T
    np.testing.assert_allclose(quantization._product_by_inputs(x, matrix), expected, atol=1e-3)


def test_4_bit_weights_on_a_gpu_reach_its_kernel_with_their_zero_points_unless_xla_was_asked_for() -> None:
    device = AbstractDevice(device_kind="a device", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("tensor",), abstract_device=device)

    def on_gpu(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    matrix = quantize(jnp.zeros((64, 256)), "int4", 8, jnp.bfloat16)
    arguments = jax.tree.map(on_gpu, (jnp.zeros((4, 256), jnp.bfloat16), matrix))
    traced = str(jax.jit(partial(quantized_matmul, backend="gpu_triton")).trace(*arguments).jaxpr)
    assert "name=quantized_matmul_triton" in traced
    assert "platform_index" not in traced, "there must be one way to compute it"
    assert "triton" not in str(jax.jit(quantized_matmul).trace(*arguments).jaxpr)
