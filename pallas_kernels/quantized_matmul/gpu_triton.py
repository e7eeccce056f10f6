"""Products with 4-bit weights in Pallas for Triton, on Ampere and later: codes stay packed until they are in registers.

A program takes 128 outputs, a tile of tokens and a share of the inputs. XLA widens a grouped matrix to memory before it
multiplies; here a byte becomes two weights on its way from a load to the tensor cores:

    byte        7654 3210      input 2i: the low half, input 2i + 1: the high half
    bits        0 10000110 000nnnn = 128 + n       bfloat16; n is the half with its sign bit turned, so code + 8
    weight      (128 + n - 136) * scale - zero * scale

Even and odd inputs are two products, so nothing is woven together again. The weight is the left operand: its 128 rows
fill the tensor cores however few the tokens are. Where outputs are too few to keep the device busy, several programs
share the inputs, and XLA adds up what they found.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST_CAPABILITY = 8.0  # Ampere: bfloat16 in its tensor cores, and copies that run ahead
OUTPUTS = (128, 64)  # of a program, the first that divides them all
STEPS = (128, 64, 32)  # inputs at a time, likewise
LEAST_TOKENS, MOST_TOKENS = 16, 128  # of a program: what a tensor core takes, and what registers hold
PROGRAMS = 132  # one for each multiprocessor of an H100 or H200; other devices have about as many
SHARED_BYTES = 96 * 1024  # for what is copied ahead: an Ada's program may have 99 KB, others more
# The number that has 1 in its last place, and its bits: a small integer put there is added to it.
_UNITS: dict[Any, tuple[int, int]] = {jnp.dtype(jnp.bfloat16): (128, 0x4300), jnp.dtype(jnp.float16): (1024, 0x6400)}
Ref = Any  # jax gives the types of references no public name


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """How a product is divided among programs.

    Attributes:
      outputs, tokens: of a program.
      inputs: of one step of its loop.
      steps: of one program.
      splits: programs that share the inputs of an output.
      stages: steps in shared memory at once.
    """

    outputs: int
    tokens: int
    inputs: int
    steps: int
    splits: int
    stages: int


def unsupported(
    code_dtype: Any, dtype: Any, outputs: int, inputs: int, groups: int, compute_capability: float | None
) -> str | None:
    """Why this kernel cannot multiply such a matrix, or None.

    Args:
      dtype: of the activations.
      groups: of one output's inputs.
      compute_capability: of the GPU; None: it is not there to be asked.
    """
    if jnp.dtype(code_dtype) != jnp.int4:
        return f"the codes are {jnp.dtype(code_dtype)}, not int4"
    if compute_capability is not None and compute_capability < LEAST_CAPABILITY:
        return f"compute capability {compute_capability} has no bfloat16 products; Ampere (8.0) and later do"
    if jnp.dtype(dtype) not in _UNITS:
        return f"activations are {jnp.dtype(dtype)}; bfloat16 and float16 are what the tensor cores multiply here"
    if outputs % OUTPUTS[-1]:
        return f"{outputs} outputs are not a multiple of {OUTPUTS[-1]}"
    group = inputs // groups
    if _inputs_of_step(inputs, group) is None:
        return f"{inputs} inputs in groups of {group} cannot be cut into steps of {', '.join(map(str, STEPS))}"
    return None


def _inputs_of_step(inputs: int, group: int) -> int | None:
    """Whole groups, a power of two of them, or a part of one."""
    return next((n for n in STEPS if inputs % n == 0 and (group % n == 0 or n % group == 0)), None)


def divide(tokens: int, outputs: int, inputs: int, groups: int) -> Blocks:
    """Blocks for a matrix that is supported."""
    step = _inputs_of_step(inputs, inputs // groups)
    assert step is not None
    rows = next(n for n in OUTPUTS if outputs % n == 0)
    columns = min(MOST_TOKENS, max(LEAST_TOKENS, 1 << (tokens - 1).bit_length()))
    tiles = outputs // rows * -(-tokens // columns)
    steps = -(-inputs // step // max(1, PROGRAMS // tiles))
    # 4.8 TB/s want 36 KB on their way to each multiprocessor: codes of 4 steps of 128 x 128, where tokens leave room.
    stages = min(6, SHARED_BYTES // (rows * step // 2 + columns * step * 2))
    splits = -(-inputs // step // steps)
    return Blocks(outputs=rows, tokens=columns, inputs=step, steps=steps, splits=splits, stages=stages)


def _multiply(
    x_ref: Ref, codes_ref: Ref, scales_ref: Ref, zeros_ref: Ref, out_ref: Ref, *, blocks: Blocks, group: int
) -> None:
    """One program. x: [even or odd, tokens, inputs / 2]; zeros may be None; out: [splits, outputs, tokens]."""
    dtype, half_group = x_ref.dtype, min(group, blocks.inputs) // 2
    unit, unit_bits = _UNITS[jnp.dtype(dtype)]
    rows = pl.program_id(0) * blocks.outputs + jnp.arange(blocks.outputs)
    tokens = pl.program_id(1) * blocks.tokens + jnp.arange(blocks.tokens)
    split = pl.program_id(2)
    groups = max(1, blocks.inputs // group)  # of a step

    def step(i: Array, total: Array) -> Array:
        first = i * (blocks.inputs // 2)  # byte of a row
        own_group = i * blocks.inputs // group + jnp.arange(groups)
        places = first + jnp.arange(groups)[:, None] * half_group + jnp.arange(half_group)[None, :]
        packed = plgpu.load(codes_ref.at[rows[:, None, None], places[None]]).astype(jnp.int16)
        scales = plgpu.load(scales_ref.at[rows[:, None], own_group[None, :]]).astype(jnp.float32)
        if zeros_ref is None:
            offsets = None
        else:
            zeros = plgpu.load(zeros_ref.at[rows[:, None], own_group[None, :]]).astype(jnp.float32)
            offsets = (zeros * scales).astype(dtype)[:, :, None]
        for odd in range(2):
            bits = ((packed >> 4 if odd else packed) & 0xF) ^ (unit_bits | 8)
            weights = (lax.bitcast_convert_type(bits, dtype) - (unit + 8)) * scales.astype(dtype)[:, :, None]
            if offsets is not None:
                weights -= offsets
            columns = first + jnp.arange(blocks.inputs // 2)
            x = plgpu.load(x_ref.at[odd, tokens[:, None], columns[None, :]])
            total += lax.dot_general(
                weights.reshape(blocks.outputs, -1), x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        return total

    first_step = split * blocks.steps
    end = jnp.minimum(first_step + blocks.steps, codes_ref.shape[1] * 2 // blocks.inputs)
    total = lax.fori_loop(first_step, end, step, jnp.zeros((blocks.outputs, blocks.tokens), jnp.float32))
    plgpu.store(out_ref.at[split, rows[:, None], tokens[None, :]], total.astype(out_ref.dtype))


def quantized_matmul(x: Array, codes: Array, scales: Array, zeros: Array | None, *, interpret: bool) -> Array:
    """x times the matrix (codes - zeros) * scales, accumulated in float32.

    Args:
      x: [tokens, inputs], bfloat16 or float16.
      codes: int4[outputs, inputs].
      scales: [outputs, groups]; a group is a run of consecutive inputs.
      zeros: like scales, any numbers; None: all are 0.
      interpret: simulate the kernel.

    Returns:
      [tokens, outputs], x's dtype.
    """
    tokens, inputs = x.shape
    outputs, groups = scales.shape
    blocks = divide(tokens, outputs, inputs, groups)
    padded = -(-tokens // blocks.tokens) * blocks.tokens
    by_parity = jnp.pad(x, ((0, padded - tokens), (0, 0))).reshape(padded, inputs // 2, 2).transpose(2, 0, 1)
    packed = lax.bitcast_convert_type(codes.reshape(outputs, inputs // 2, 2), jnp.int8)
    out_type = jax.ShapeDtypeStruct(
        (blocks.splits, outputs, padded), x.dtype if blocks.splits == 1 else jnp.dtype(jnp.float32)
    )
    numbers = 0 if zeros is None else zeros.size
    matrix_bytes = codes.size // 2 + (scales.size + numbers) * scales.dtype.itemsize
    out = pl.pallas_call(
        functools.partial(_multiply, blocks=blocks, group=inputs // groups),
        out_shape=out_type,
        grid=(outputs // blocks.outputs, padded // blocks.tokens, blocks.splits),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.outputs // 16, num_stages=blocks.stages),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * codes.size,
            transcendentals=0,
            bytes_accessed=matrix_bytes * (padded // blocks.tokens)
            + by_parity.size * by_parity.dtype.itemsize
            + out_type.size * out_type.dtype.itemsize,
        ),
        name="quantized_matmul_triton",
    )(by_parity, packed, scales, zeros)
    return out.sum(axis=0).T[:tokens].astype(x.dtype)
