"""How a matrix is stored in 8 or 4 bits: codes, a scale for each group of inputs, and zero points; knows no checkpoint.

A weight is (code - zero) * scale. A group is a run of consecutive inputs of one output; int8 and fp8 have one a row
and no zero points, int4 has groups of 128, 64 or 32 with a zero point each. What is computed is the product with the
wide weight, the codes widened on their way into the dot. Activations stay as they are, but on CPUs: there the kernel
rounds them to 8 bits, 32 inputs at a time, and XLA with int8 weights to two digits of 8 bits.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from models.config import ModelConfig, Quantization, WeightFormat
from models.errors import UnsupportedModelError
from pallas_kernels.quantized_matmul import MatmulBackend, cpu, find_kernel

CODE_DTYPES: dict[WeightFormat, Any] = {"int8": jnp.int8, "int4": jnp.int4, "fp8_e4m3": jnp.float8_e4m3fn}
_LARGEST: dict[WeightFormat, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
_INT4_STEPS = 15  # from -8 to 7
_LOW_DIGITS = 254.0  # half a step is 127 of them
BLOCK_WEIGHTS = 2**18  # widened at a time on the CPU: 1 MB
TPU_BLOCK_WEIGHTS = 2**21  # on TPU: 4 MB of its VMEM
_SHARES = tuple(1.0 - 0.025 * i for i in range(13))  # of a group's range, see `quantize`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in] in few bits.

    Attributes:
      codes: [out, in], int8, int4 or float8_e4m3fn.
      scales: [out, groups], the model's dtype; one group where a row has one scale.
      zeros: like scales, any numbers; None: all are 0.
    """

    codes: Array
    scales: Array
    zeros: Array | None

    @property
    def is_by_row(self) -> bool:
        """Whether a whole row has one scale, which can as well multiply the result."""
        return self.scales.shape[1] == 1 and self.zeros is None


def format_of(code_dtype: Any) -> WeightFormat:
    """The format whose codes have this dtype."""
    return next(format for format, dtype in CODE_DTYPES.items() if jnp.dtype(dtype) == code_dtype)


def group_count(quantization: Quantization, features_in: int) -> int:
    return 1 if quantization.group_size is None else features_in // quantization.group_size


def matrix_shapes(model: ModelConfig, tensor: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's matrices by name, on each of `tensor` devices.

    Args:
      model: in the form that is split (`models.partition`).
    """
    hidden, inner = model.hidden_size, model.intermediate_size // tensor
    heads, kv_heads = (count * model.head_dim // tensor for count in (model.num_heads, model.num_kv_heads))
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def check_groups(model: ModelConfig, tensor: int) -> None:
    """Raises UnsupportedModelError unless every matrix, split over `tensor` devices, has whole groups.

    Args:
      model: in the form that is split (`models.partition`).
    """
    quantization = model.quantization
    if quantization is None or quantization.group_size is None:
        return
    inputs = {name: shape[1] for name, shape in matrix_shapes(model, tensor).items()}
    for name, size in inputs.items():
        if size % quantization.group_size:
            fitting = [str(group) for group in (128, 64, 32, 16) if all(n % group == 0 for n in inputs.values())]
            raise UnsupportedModelError(
                f"{quantization.format} in groups of {quantization.group_size} (the checkpoint's, or else "
                f"model.quantization_group_size) does not divide the {size} inputs that {name}.weight has on each of "
                f"{tensor} devices; "
                + (f"{', '.join(fitting)} would" if fitting else "int8 (model.quantization) needs no groups")
            )


def quantize(
    weight: Array, format: WeightFormat, groups: int, dtype: Any, importance: Array | None = None
) -> QuantizedMatrix:
    """Rounds to the nearest code.

    Of a few shares of a group's range the one with the least squared error is taken: what lies outside saturates, what
    lies inside is finer. With a scale for a whole row that gains nothing unless some inputs matter less than others
    (a saturated weight of 8 bits costs more than all others gain), so int8 and fp8 try them by importance only.

    Args:
      weight: [out, in].
      dtype: of the scales; codes are chosen for the scale as it is stored.
      importance: float32[in], what an input's squared errors count; None: all alike.
    """
    wide = weight.astype(jnp.float32).reshape(weight.shape[0], groups, -1)
    counts = None if importance is None else importance.reshape(1, groups, -1)
    shares = _SHARES if format == "int4" or importance is not None else _SHARES[:1]

    def candidate(share: float) -> tuple[Array, QuantizedMatrix]:
        scales, zeros = _scales_and_zeros(wide, format, share, dtype)
        by_group = QuantizedMatrix(
            codes=encode(wide, scales[..., None], None if zeros is None else zeros[..., None], format),
            scales=scales,
            zeros=zeros,
        )
        error = (_widened(by_group, jnp.float32) - wide) ** 2
        return (error if counts is None else error * counts).sum(axis=2), by_group

    least, best = candidate(shares[0])
    for share in shares[1:]:
        error, other = candidate(share)
        is_better = error < least
        least = jnp.where(is_better, error, least)
        best = QuantizedMatrix(
            codes=jnp.where(is_better[..., None], other.codes, best.codes),
            scales=jnp.where(is_better, other.scales, best.scales),
            zeros=jax.tree.map(partial(jnp.where, is_better), other.zeros, best.zeros),
        )
    return dataclasses.replace(best, codes=best.codes.astype(CODE_DTYPES[format]).reshape(weight.shape))


def encode(wide: Array, scales: Array, zeros: Array | None, format: WeightFormat) -> Array:
    """The codes nearest to float32 weights, as float32; scales and zeros of a shape that spreads over them."""
    wide_scales = scales.astype(jnp.float32)
    steps = wide / jnp.where(wide_scales == 0, 1.0, wide_scales)  # nothing but zeros has no scale
    if format == "int4":
        offset = 0.0 if zeros is None else zeros.astype(jnp.float32)
        return jnp.clip(jnp.round(steps + offset), -8, 7)
    largest = _LARGEST[format]
    steps = jnp.clip(steps, -largest, largest)
    return steps.astype(CODE_DTYPES[format]).astype(jnp.float32) if format == "fp8_e4m3" else jnp.round(steps)


def _scales_and_zeros(wide: Array, format: WeightFormat, share: float, dtype: Any) -> tuple[Array, Array | None]:
    """[out, groups] each, for codes that reach a share of the groups' ranges; wide: [out, groups, in / groups]."""
    if format != "int4":
        return (jnp.abs(wide).max(axis=2) * share / _LARGEST[format]).astype(dtype), None
    low, high = wide.min(axis=2), wide.max(axis=2)
    middle, spread = (low + high) / 2, high - low
    # Weights that are all alike have no range: their size is the step, and one code is enough.
    scales = jnp.where(spread == 0, jnp.abs(low), spread * share / _INT4_STEPS).astype(dtype)
    lowest = jnp.where(spread == 0, low, middle - spread * share / 2)
    stored = scales.astype(jnp.float32)
    return scales, (-8 - lowest / jnp.where(stored == 0, 1.0, stored)).astype(dtype)


def dequantize(matrix: QuantizedMatrix, dtype: Any) -> Array:
    """The wide matrix, [out, in]."""
    by_group = dataclasses.replace(matrix, codes=matrix.codes.astype(dtype).reshape(*matrix.scales.shape, -1))
    return _widened(by_group, dtype).reshape(matrix.codes.shape)


def _widened(by_group: QuantizedMatrix, dtype: Any) -> Array:
    """Codes of [out, groups, in / groups], times their scales."""
    codes = by_group.codes.astype(dtype)
    if by_group.zeros is not None:
        codes = codes - by_group.zeros.astype(dtype)[..., None]
    return codes * by_group.scales.astype(dtype)[..., None]


def quantized_matmul(
    x: Array, matrix: QuantizedMatrix, *, has_whole_inputs: bool = True, backend: MatmulBackend = "xla"
) -> Array:
    """[tokens, in] times [out, in] -> [tokens, out], accumulated in float32 (on the CPU int8 in int32).

    Args:
      has_whole_inputs: on a mesh a device has all inputs of some outputs; False: all outputs, of some inputs.
      backend: cpu rounds the activations too (`pallas_kernels.quantized_matmul.cpu`); gpu_triton leaves to XLA what it
        cannot take.
    """
    if backend == "cpu":
        return quantized_matmuls(x, [matrix])[0]
    if backend == "gpu_triton":
        kernel = find_kernel(x, matrix.codes, matrix.scales, has_whole_inputs=has_whole_inputs)
        if kernel is not None:
            return kernel(x, matrix.codes, matrix.scales, matrix.zeros)
    by_integers = matrix.is_by_row and matrix.codes.dtype == jnp.int8
    on_cpu = _product_of_integers if by_integers else _product_by_blocks
    in_parts = _product_by_inputs if has_whole_inputs else partial(_product_by_blocks, block_weights=TPU_BLOCK_WEIGHTS)
    on_tpu = _product if matrix.is_by_row else in_parts
    return jax.lax.platform_dependent(x, matrix, cpu=on_cpu, tpu=on_tpu, default=_product)


def quantized_matmuls(x: Array, matrices: Sequence[QuantizedMatrix]) -> tuple[Array, ...]:
    """`quantized_matmul` by the CPU's kernel with up to 4 matrices of one form at once: tokens are rounded once."""
    return cpu.quantized_matmuls(x, [(matrix.codes, matrix.scales, matrix.zeros) for matrix in matrices])


def _product(x: Array, matrix: QuantizedMatrix) -> Array:
    """One scale a row multiplies the result; groups have to be multiplied before the dot sums over them."""
    weight = matrix.codes.astype(x.dtype) if matrix.is_by_row else dequantize(matrix, x.dtype)
    out = jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if matrix.is_by_row:
        out = out * matrix.scales[:, 0].astype(jnp.float32)
    return out.astype(x.dtype)


def _product_by_inputs(x: Array, matrix: QuantizedMatrix) -> Array:
    """Some groups at a time: of all at once a TPU's compiler writes the scales and zero points to HBM, one for each
    weight, eight times the codes' bytes. What is widened of a few groups stays in VMEM."""
    outputs, inputs = matrix.codes.shape
    groups = matrix.scales.shape[1]
    turns = 1
    while groups % (2 * turns) == 0 and outputs * inputs // turns > TPU_BLOCK_WEIGHTS:
        turns *= 2

    def add(turn: Array, total: Array) -> Array:
        def part(array: Array) -> Array:
            size = array.shape[1] // turns
            return jax.lax.dynamic_slice_in_dim(array, turn * size, size, axis=1)

        weight = dequantize(jax.tree.map(part, matrix), x.dtype)
        return total + jax.lax.dot_general(
            part(x), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    out = jax.lax.fori_loop(0, turns, add, jnp.zeros((x.shape[0], outputs), jnp.float32))
    return out.astype(x.dtype)


def _product_of_integers(x: Array, matrix: QuantizedMatrix) -> Array:
    """Both sides as int8: a CPU multiplies those several times faster than floats (VNNI and its like).

    An activation is two digits, x = scale * (high + low / 254), so that what is lost is the weights' rounding alone:
    with one digit the embedded model's perplexity rises by 4 %, with two by what the weights cost. The digits are
    twice the tokens in one dot. The scale is a token's own (Dettmers et al. 2022), so no token depends on another; one
    that is not finite has a scale that is not, and so has its result.
    """
    tokens = x.shape[0]
    wide = x.astype(jnp.float32)
    scales = jnp.abs(wide).max(axis=1) / _LARGEST["int8"]
    steps = wide / jnp.where(scales == 0, 1.0, scales)[:, None]
    high = jnp.round(steps)
    digits = jnp.concatenate([high, jnp.round((steps - high) * _LOW_DIGITS)]).astype(jnp.int8)
    # The weight on the left, and a barrier in front of the transpose: see `models.layers`.
    out = jax.lax.dot_general(matrix.codes, digits, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    sums = jax.lax.optimization_barrier(out).astype(jnp.float32)
    sums = (sums[:, :tokens] + sums[:, tokens:] / _LOW_DIGITS) * matrix.scales.astype(jnp.float32)
    return (sums.T * scales[:, None]).astype(x.dtype)


def _product_by_blocks(x: Array, matrix: QuantizedMatrix, *, block_weights: int = BLOCK_WEIGHTS) -> Array:
    """A block of outputs at a time: the CPU's compiler writes the wide weights to memory, and all layers' at once would
    be a hundred megabytes of fresh pages a step; a block stays in its cache. The weight is on the left, as it is in
    `models.layers.matmul`."""
    rows, columns = matrix.codes.shape
    blocks = 1
    while rows % (2 * blocks) == 0 and rows // blocks * columns > block_weights:
        blocks *= 2
    is_fp8 = matrix.codes.dtype == jnp.float8_e4m3fn
    # Narrow floats cannot be sliced here without being widened as a whole; their bits can.
    codes = jax.lax.bitcast_convert_type(matrix.codes, jnp.int8) if is_fp8 else matrix.codes
    split = jax.tree.map(lambda a: a.reshape(blocks, -1, a.shape[1]), dataclasses.replace(matrix, codes=codes))

    def product(block: QuantizedMatrix) -> Array:
        if is_fp8:
            block = dataclasses.replace(
                block, codes=jax.lax.bitcast_convert_type(block.codes, jnp.float8_e4m3fn).astype(jnp.float32)
            )
        weight = block.codes.astype(x.dtype) if block.is_by_row else dequantize(block, x.dtype)
        out = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return out * block.scales.astype(jnp.float32) if block.is_by_row else out

    return jax.lax.map(product, split).reshape(rows, -1).T.astype(x.dtype)
