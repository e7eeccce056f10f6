"""Narrow formats inside the GPU kernels, in arithmetic that all their compilers have; `kv_format` says what codes mean.

Shifts are products: Mosaic GPU has none before jax 0.11. Codes of 8 and 4 bits are exact in bfloat16 and float16.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kv_dtype import KVDtype

_LEAST_INT32 = -(1 << 31)
# Bits of fp8, put where float32 has its exponent and mantissa, are a number that is too small by a power of two: the
# formats' biases are 7 and 15, float32's is 127. Subnormal numbers are too, as subnormal numbers.
_FP8 = {"fp8_e4m3": (1 << 20, 2.0**120), "fp8_e5m2": (1 << 21, 2.0**112)}


def scales(bits: Array) -> Array:
    """float32, from the int16 that holds a bfloat16."""
    return lax.bitcast_convert_type(bits.astype(jnp.int32) * (1 << 16), jnp.float32)


def numbers(codes: Array, dtype: KVDtype, *, of_values: bool) -> Array:
    """float32, still to be multiplied by scales. codes: int8, of keys or values alone, save that int4's hold both."""
    if dtype == "int8":
        return codes.astype(jnp.float32)
    wide = codes.astype(jnp.int32)
    if dtype == "int4":
        low = wide & 15
        if of_values:
            return (wide - low).astype(jnp.float32) * (1 / 16) + 0.5
        return ((low + 8) & 15).astype(jnp.float32) - 7.5
    place, factor = _FP8[dtype]
    return lax.bitcast_convert_type((wide & _LEAST_INT32) | ((wide & 127) * place), jnp.float32) * factor
