"""The pieces that decoder models share: linear, norm, rotary embedding. They know arrays and a ModelConfig."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.config import Quantization, RopeConfig
from models.quantization import (
    CODE_DTYPES,
    QuantizedMatrix,
    dequantize,
    group_count,
    quantized_matmul,
    quantized_matmuls,
)
from pallas_kernels.quantized_matmul import MatmulBackend

Axes = tuple[str | None, ...]


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param[Array]:
    """A parameter of which only the shape exists yet; `axes` are logical names that `sharding` maps to a mesh."""
    return nnx.Param(cast(Any, jax.ShapeDtypeStruct(shape, dtype)), axes=axes)


class Matrix(nnx.Module):
    """weight: [out, in], as checkpoints store it; its codes, with scales and zeros beside, where it is quantized."""

    def __init__(
        self,
        shape: tuple[int, int],
        axes: Axes,
        dtype: jnp.dtype,
        quantization: Quantization | None = None,
        backend: MatmulBackend = "xla",
    ) -> None:
        groups = 0 if quantization is None else group_count(quantization, shape[1])
        by_group = partial(parameter, (shape[0], groups), (axes[0], axes[1] if groups > 1 else None), dtype)
        codes = dtype if quantization is None else jnp.dtype(CODE_DTYPES[quantization.format])
        self.weight = parameter(shape, axes, codes)
        self.has_whole_inputs = axes[1] == "embed"  # which no mesh splits
        self.backend = backend
        self.scales = None if quantization is None else by_group()
        self.zeros = by_group() if quantization is not None and quantization.has_zeros else None

    def times(self, x: Array) -> Array:
        """[tokens, in] -> [tokens, out]."""
        if self.scales is None:
            return matmul(x, self.weight[...])
        matrix = self.quantized()
        return quantized_matmul(x, matrix, has_whole_inputs=self.has_whole_inputs, backend=self.backend)

    def quantized(self) -> QuantizedMatrix:
        assert self.scales is not None
        zeros = None if self.zeros is None else self.zeros[...]
        return QuantizedMatrix(codes=self.weight[...], scales=self.scales[...], zeros=zeros)


class Embedding(Matrix):
    """weight: [vocab, hidden]."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        dtype: jnp.dtype,
        quantization: Quantization | None = None,
        backend: MatmulBackend = "xla",
    ) -> None:
        super().__init__((vocab_size, features), ("vocab", "embed"), dtype, quantization, backend)

    def __call__(self, token_ids: Array) -> Array:
        rows = [
            None if part is None else part[...].at[token_ids].get(mode="promise_in_bounds")
            for part in (self.weight, self.scales, self.zeros)
        ]
        codes, scales, zeros = rows
        assert codes is not None
        if scales is None:
            return codes
        return dequantize(QuantizedMatrix(codes=codes, scales=scales, zeros=zeros), scales.dtype)


class Linear(Matrix):
    """bias: [out]."""

    def __init__(
        self,
        features_in: int,
        features_out: int,
        axes: Axes,
        dtype: jnp.dtype,
        *,
        bias: bool,
        quantization: Quantization | None = None,
        backend: MatmulBackend = "xla",
    ) -> None:
        super().__init__((features_out, features_in), axes, dtype, quantization, backend)
        self.bias = parameter((features_out,), axes[:1], dtype) if bias else None

    def __call__(self, x: Array) -> Array:
        return self.plus_bias(self.times(x))

    def plus_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias[...]


def apply_together(linears: Sequence[Linear], x: Array) -> tuple[Array, ...]:
    """Each linear of the same tokens. The CPU's kernel for narrow weights takes them in one call.

    Whoever watches a layer may have put callables of its own in the linears' places.
    """
    if not all(
        isinstance(linear, Linear) and linear.scales is not None and linear.backend == "cpu" for linear in linears
    ):
        return tuple(linear(x) for linear in linears)
    products = quantized_matmuls(x, [linear.quantized() for linear in linears])
    return tuple(linear.plus_bias(y) for linear, y in zip(linears, products, strict=True))


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), computed in float32. weight: [hidden]."""

    def __init__(self, features: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = parameter((features,), ("embed",), dtype)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


def matmul(x: Array, weight: Array) -> Array:
    """[tokens, in] times [out, in] -> [tokens, out], multiplied in the weight's dtype, accumulated in float32."""
    return jax.lax.platform_dependent(x, weight, cpu=_matmul_weight_left, default=_matmul)


def _matmul(x: Array, weight: Array) -> Array:
    out = jax.lax.dot_general(
        x.astype(weight.dtype), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return out.astype(x.dtype)


def _matmul_weight_left(x: Array, weight: Array) -> Array:
    # At 8 to 64 tokens XLA's CPU GEMM is 2 to 8 times faster with the weight as the left operand. The barrier keeps
    # XLA from folding the transpose back into the slow form.
    out = jax.lax.dot_general(
        weight, x.astype(weight.dtype), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jax.lax.optimization_barrier(out).T.astype(x.dtype)


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array, rope_lengths: Array) -> tuple[Array, Array]:
    """cos and sin of each token's rotation (RoFormer, Su et al. 2021): two float32[tokens, head_dim / 2].

    Args:
      positions: int32[tokens].
      rope_lengths: int32[tokens], see `StepBatch`; read by `dynamic` alone.
    """
    frequencies = _inverse_frequencies(rope, head_dim)
    if rope.kind == "dynamic":
        # NTK-aware: the base grows with the length, so the slowest pair just spans the longer context.
        stretch = rope.factor * rope_lengths / rope.original_max_position - (rope.factor - 1.0)
        stretch = jnp.maximum(1.0, stretch.astype(jnp.float32))
        pairs = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        base = rope.theta * stretch ** (head_dim / (head_dim - 2))
        frequencies = 1.0 / base[:, None] ** pairs[None, :]
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Array:
    """float32[head_dim / 2]: radians per position of each rotated pair."""
    plain = 1.0 / rope.theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    match rope.kind:
        case "default" | "dynamic":
            frequencies = plain
        case "linear":
            frequencies = plain / rope.factor
        case "llama3":
            frequencies = _llama3(rope, plain)
        case "yarn":
            frequencies = _yarn(rope, head_dim, plain)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / jnp.asarray(rope.frequency_divisors, jnp.float32)
    return frequencies


def _llama3(rope: RopeConfig, plain: Array) -> Array:
    """Slow pairs are stretched by `factor`, fast ones kept, the band between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    return jnp.where(wavelengths > low, plain / rope.factor, jnp.where(wavelengths < high, plain, blended))


def _yarn(rope: RopeConfig, head_dim: int, plain: Array) -> Array:
    """YaRN (Peng et al. 2023): pairs that turn more than `beta_fast` times in the trained context are kept, those that
    turn less than `beta_slow` times are stretched, a linear ramp between."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    kept = 1.0 - jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / width, 0.0, 1.0)
    return plain / rope.factor * (1 - kept) + plain * kept


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the pairs (i, i + head_dim / 2) of [tokens, heads, head_dim]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
