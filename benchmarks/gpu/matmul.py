"""Checks the product with 4-bit weights on this device, and times it against XLA's own ways with a matrix."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from matmul_cases import CASES, MOST_ERROR, error_over_bound, make_inputs

from pallas_kernels.quantized_matmul import gpu_triton

Timer = Callable[..., float]  # a dispatch, and how many `calls` it makes -> seconds of one
HEAD = "| tokens | limit | kernel | XLA, 4 bits | XLA, bfloat16 |\n| --- | --- | --- | --- | --- |"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured. The defaults are Llama-3-8B's way into the MLP, several of them: more than a cache holds."""

    outputs: int = 14336
    inputs: int = 4096
    group: int = 32
    matrices: int = 8
    tokens: tuple[int, ...] = (1, 16, 64, 256, 512)


LLAMA_3_8B = Plan()
DRY = Plan(outputs=128, inputs=256, matrices=2, tokens=(1,))


def check() -> tuple[list[str], bool]:
    """Rows of the table of numerics, and whether all is as it should be."""
    rows, all_good = [], True
    for case in CASES:
        out = jax.jit(partial(gpu_triton.quantized_matmul, interpret=_must_simulate()))(*make_inputs(case))
        error = error_over_bound(case, out)
        good = error <= MOST_ERROR  # false for NaN too
        all_good &= good
        verdict = "good" if good else "**WRONG**"
        cells = (f"4-bit weights: {case.name}", "gpu_triton", case.dtype, f"{error:.2f} of the bound", verdict)
        rows.append(f"| {' | '.join(cells)} |")
    return rows, all_good


def time_products(plan: Plan, read_bytes_per_s: float, timer: Timer, deadline: float) -> list[str]:
    """Rows of the table: microseconds a product, and the share of what reading the matrix once would take."""
    keys = jax.random.split(jax.random.key(0), plan.matrices)
    matrices = [jax.jit(partial(_matrix, plan))(key) for key in keys]
    wide = [jax.jit(_widened)(*matrix) for matrix in matrices]
    matrix_bytes = plan.outputs * plan.inputs // 2 + sum(array.nbytes for array in matrices[0][1:])
    least = matrix_bytes / read_bytes_per_s
    rows = []
    for tokens in plan.tokens:
        x = jnp.ones((tokens, plan.inputs), jnp.bfloat16)
        cells = [str(tokens), f"{least * 1e6:.1f}"]
        for product, operands in ((_by_kernel, matrices), (_by_xla, matrices), (_by_wide_xla, [(w,) for w in wide])):
            if time.monotonic() > deadline:
                cells.append("no time left")
                continue
            run = jax.jit(partial(_all_products, product))
            seconds = timer(partial(run, x, operands), calls=plan.matrices)
            cells.append(f"{seconds * 1e6:.1f} ({least / seconds:.0%})")
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def _all_products(product: Callable[..., Array], x: Array, operands: list[tuple[Array, ...]]) -> list[Array]:
    return [product(x, *own) for own in operands]


def _matrix(plan: Plan, key: Array) -> tuple[Array, Array, Array]:
    """Codes, scales and zero points."""
    of_codes, of_scales, of_zeros = jax.random.split(key, 3)
    groups = (plan.outputs, plan.inputs // plan.group)
    codes = jax.random.randint(of_codes, (plan.outputs, plan.inputs), -8, 8, jnp.int8).astype(jnp.int4)
    scales, zeros = (jax.random.normal(part, groups, jnp.bfloat16) for part in (of_scales, of_zeros))
    return codes, scales, zeros


def _widened(codes: Array, scales: Array, zeros: Array) -> Array:
    grouped = codes.astype(scales.dtype).reshape(*scales.shape, -1)
    return ((grouped - zeros[..., None]) * scales[..., None]).reshape(codes.shape)


def _by_kernel(x: Array, codes: Array, scales: Array, zeros: Array) -> Array:
    return gpu_triton.quantized_matmul(x, codes, scales, zeros, interpret=_must_simulate())


def _by_xla(x: Array, codes: Array, scales: Array, zeros: Array) -> Array:
    return _by_wide_xla(x, _widened(codes, scales, zeros))


def _by_wide_xla(x: Array, weight: Array) -> Array:
    out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def _must_simulate() -> bool:
    return jax.devices()[0].platform != "gpu"
