"""The GPU's product with 4-bit weights, simulated, against numpy in float64; and what it leaves to others."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from matmul_cases import CASES, MOST_ERROR, MatmulCase, error_over_bound, make_inputs
from quick_compilation import QUICK_OPTIONS

from pallas_kernels.quantized_matmul import find_kernel, gpu_triton
from pallas_kernels.quantized_matmul.api import MOST_TOKENS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_product_with_packed_codes_is_that_of_the_wide_matrix(
    case: MatmulCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_triton, "PROGRAMS", 3)
    run = partial(gpu_triton.quantized_matmul, interpret=True)
    out = jax.jit(run, compiler_options=QUICK_OPTIONS)(*make_inputs(case))
    assert out.dtype == jnp.dtype(case.dtype)
    assert error_over_bound(case, out) <= MOST_ERROR


@pytest.mark.parametrize(
    ("codes", "dtype", "outputs", "inputs", "groups", "reason"),
    [
        (jnp.int8, jnp.bfloat16, 128, 256, 8, "the codes are int8, not int4"),
        (jnp.int4, jnp.float32, 128, 256, 8, "activations are float32"),
        (jnp.int4, jnp.bfloat16, 96, 256, 8, "96 outputs are not a multiple of 64"),
        (jnp.int4, jnp.bfloat16, 128, 288, 3, None),
        (jnp.int4, jnp.bfloat16, 128, 240, 5, "240 inputs in groups of 48 cannot be cut into steps of 128, 64, 32"),
    ],
)
def test_what_it_cannot_multiply_is_named(
    codes: Any, dtype: Any, outputs: int, inputs: int, groups: int, reason: str | None
) -> None:
    found = gpu_triton.unsupported(codes, dtype, outputs, inputs, groups, 9.0)
    assert (found is None) if reason is None else (found is not None and reason in found)
    assert "Ampere" in (gpu_triton.unsupported(jnp.int4, dtype, outputs, inputs, groups, 7.5) or "")


def test_programs_share_inputs_until_every_core_has_one() -> None:
    for tokens, outputs, inputs in ((1, 1024, 4096), (64, 4096, 4096), (64, 14336, 4096), (64, 4096, 14336)):
        blocks = gpu_triton.divide(tokens, outputs, inputs, inputs // 32)
        programs = outputs // blocks.outputs * blocks.splits
        assert gpu_triton.PROGRAMS * 3 // 4 <= programs <= gpu_triton.PROGRAMS
        share = blocks.steps * blocks.inputs
        assert (blocks.splits - 1) * share < inputs <= blocks.splits * share


def traced_for(tokens: int, dtype: Any, *, devices: int = 1, has_whole_inputs: bool = True) -> str:
    """What is traced where the arrays are on so many devices."""
    device = AbstractDevice(device_kind="a device", num_cores=132, platform="gpu")
    mesh = AbstractMesh((devices,), ("tensor",), (AxisType.Auto,), abstract_device=device)

    def argument(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def run(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array | None:
        kernel = find_kernel(x, codes, scales, has_whole_inputs=has_whole_inputs)
        return None if kernel is None else kernel(x, codes, scales, None)

    arguments = argument((tokens, 256), dtype), argument((128, 256), jnp.int4), argument((128, 8), dtype)
    return str(jax.jit(run).trace(*arguments).jaxpr)


def test_few_tokens_are_multiplied_by_the_kernel_and_many_are_not() -> None:
    assert "quantized_matmul_triton" in traced_for(8, jnp.bfloat16)
    assert "quantized_matmul_triton" not in traced_for(MOST_TOKENS + 1, jnp.bfloat16)


def test_each_device_of_a_mesh_is_given_its_own_part_of_the_matrix() -> None:
    by_output = traced_for(8, jnp.bfloat16, devices=2)
    assert "i8[64,128]" in by_output  # two codes a byte
    assert "psum" not in by_output
    by_input = traced_for(8, jnp.bfloat16, devices=2, has_whole_inputs=False)
    assert "i8[128,64]" in by_input
    assert "psum" in by_input


def test_a_matrix_that_the_kernel_cannot_take_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert "quantized_matmul_triton" not in traced_for(8, jnp.float32)
    assert [record.message for record in caplog.records] == [
        "4-bit weights are widened in memory before they are multiplied: activations are float32; "
        "bfloat16 and float16 are what the tensor cores multiply here"
    ]
