"""How numbers lie in a page: plain floats, or 8 and 4 bit codes with a scale for every token and head; knows no kernel.

A narrow format stores x as a code q and a scale, x ~ q * scale, with one scale for each token, KV head and half (key,
value), computed when the token is written: no calibration, and neither padding nor a neighbour can reach a maximum.
Scales are symmetric, largest |x| / largest |code|, rounded up to bfloat16 so that no code exceeds its range. Formats of
few digits try some other scales too, and each vector takes the one with the least squared error.

Codes and scales are stored as integers whatever they mean: XLA's CPU compiler scatters integers in place, and narrow
floats only after copying the pool (jax 0.10).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_dtype import KVDtype, is_quantized

# The largest number of each narrow format. int4's are halves, -7.5, -6.5 ... 7.5, stored as the integers below: all 16
# patterns count, and a number and its negative have the same error.
LARGEST: dict[KVDtype, float] = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.5}
# Other scales to try, as parts of the one that just holds the largest number. The smaller ones of int4 cut it, where
# the others gain by it. fp8_e5m2's (7/6, 7/5, 7/4) make it 3/2, 5/4 or 1 times a power of two, not 7/4: it stays exact,
# and the others lie elsewhere between their four numbers an octave.
OTHER_SCALES: dict[KVDtype, tuple[float, ...]] = {"int4": (0.9, 0.8), "fp8_e5m2": (299 / 256, 359 / 256, 7 / 4)}
MOST = 3e38  # just below the largest bfloat16
_FP8 = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVPages:
    """One layer's pages. A token's key and value lie side by side: one copy brings both.

    Attributes:
      data: [pages, kv_heads, page_size, 2 * head_dim], in `dtype` where that is a plain float, else int8: the codes of
        int8, or the bits of fp8. int4 has half the width, [..., head_dim]: the low half of byte d is the key's
        code d, the high half the value's, each in two's complement.
      scales: int16[pages, kv_heads, 2, page_size], the bits of bfloat16: keys' scales, then values'. None for floats.
      dtype: the format; static.
    """

    data: Array
    scales: Array | None
    dtype: KVDtype = dataclasses.field(metadata={"static": True})

    @staticmethod
    def shapes(num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: KVDtype) -> "KVPages":
        """The pages as ShapeDtypeStructs: for compiling before any memory is taken."""
        narrow = is_quantized(dtype)
        width = head_dim if dtype == "int4" else 2 * head_dim
        data = jax.ShapeDtypeStruct((num_pages, kv_heads, page_size, width), jnp.int8 if narrow else jnp.dtype(dtype))
        scales = jax.ShapeDtypeStruct((num_pages, kv_heads, 2, page_size), jnp.int16) if narrow else None
        return KVPages(data=cast(Array, data), scales=cast("Array | None", scales), dtype=dtype)

    @property
    def head_dim(self) -> int:
        width: int = self.data.shape[-1]
        return width if self.dtype == "int4" else width // 2


def quantize(x: Array, dtype: KVDtype) -> tuple[Array, Array]:
    """Codes and scales of a step's new keys, or of its values.

    Args:
      x: [..., head_dim]. An infinity saturates; a NaN makes its own scale NaN, so that whoever reads it sees one.

    Returns:
      int8[..., head_dim], codes (int4: from -8 to 7, not yet packed) or the bits of fp8; int16[...], scales.
    """
    x = x.astype(jnp.float32)
    x = jnp.clip(x, -MOST, MOST)
    largest = LARGEST[dtype]
    scale_bits = _round_up(jnp.abs(x).max(axis=-1) / largest)
    if dtype in OTHER_SCALES:
        scale_bits = _least_error(x, scale_bits, dtype)
    codes = jnp.clip(_divide(x, scale_of(scale_bits)), -largest, largest)
    if dtype in _FP8:
        return jax.lax.bitcast_convert_type(codes.astype(_FP8[dtype]), jnp.int8), scale_bits
    return (_int4(codes) if dtype == "int4" else jnp.round(codes)).astype(jnp.int8), scale_bits


def scale_of(bits: Array) -> Array:
    """Scales as float32, from the integers that hold them."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32) << 16, jnp.float32)


def pack(k: Array, v: Array, dtype: KVDtype) -> Array:
    """Codes of keys and values, int8[..., head_dim] each, as they lie in `KVPages.data`."""
    if dtype == "int4":
        return (k & 0xF) | (v << 4)
    return jnp.concatenate([k, v], axis=-1)


def unpack(data: Array, dtype: KVDtype) -> tuple[Array, Array]:
    """Keys and values of pages or parts of them, [..., head_dim] each, still to be multiplied by their scales.

    Narrow formats come as float32, which holds every code exactly; floats as they are.
    """
    if dtype == "int4":
        return (data << 4 >> 4).astype(jnp.float32) + 0.5, (data >> 4).astype(jnp.float32) + 0.5
    if dtype in _FP8:
        data = jax.lax.bitcast_convert_type(data, _FP8[dtype])
    k, v = jnp.split(data, 2, axis=-1)
    return (k.astype(jnp.float32), v.astype(jnp.float32)) if is_quantized(dtype) else (k, v)


def _least_error(x: Array, whole_bits: Array, dtype: KVDtype) -> Array:
    """Of the scale that just holds all of x and the others to try, the one with the least squared error, as bits."""
    whole = scale_of(whole_bits)
    units = _divide(x, whole)  # of one magnitude, whatever x is: their squares neither overflow nor vanish
    best_bits, least = whole_bits, jnp.square(_nearest(units, dtype) - units).sum(axis=-1)
    for factor in OTHER_SCALES[dtype]:
        bits = _round_up(whole * factor)
        ratio = (scale_of(bits) / jnp.where(whole == 0, 1, whole))[..., None]
        error = jnp.square(_nearest(units / ratio, dtype) * ratio - units).sum(axis=-1)
        best_bits, least = jnp.where(error < least, bits, best_bits), jnp.minimum(error, least)
    return best_bits


def _nearest(units: Array, dtype: KVDtype) -> Array:
    """The numbers that codes mean, for int4 and fp8_e5m2; of the latter the even steps near zero do not count here."""
    return _int4(units) + 0.5 if dtype == "int4" else jax.lax.reduce_precision(units, exponent_bits=8, mantissa_bits=2)


def _divide(x: Array, scale: Array) -> Array:
    """x / scale, [..., n] by [...]; a scale of 0 means that x is 0."""
    return x / jnp.where(scale == 0, 1, scale)[..., None]


def _int4(units: Array) -> Array:
    return jnp.clip(jnp.floor(units), -8, 7)


def _round_up(positive: Array) -> Array:
    """The next bfloat16 that is no smaller, as int16 bits. NaN stays NaN."""
    bits = jax.lax.bitcast_convert_type(positive, jnp.int32)
    up = ((bits + 0xFFFF) >> 16).astype(jnp.int16)
    return jnp.where(jnp.isnan(positive), jnp.int16(0x7FC0), up)
