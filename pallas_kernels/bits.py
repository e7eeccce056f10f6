"""Narrow floats as the unsigned integers that hold them, for moving without computing.

XLA's CPU compiler (jax 0.10) has no bfloat16 gather: in a loop it widens the whole pool to float32 first (on 2,049
pages 32 ms of CPU time a layer, instead of 5). Integers of the same width it moves as they are.
"""

import jax
import jax.numpy as jnp
from jax import Array


def to_bits(array: Array) -> Array:
    """The array as it lies in memory: unsigned integers in place of floats narrower than 32 bits."""
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize >= 4:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def from_bits(bits: Array, dtype: jnp.dtype) -> Array:
    """The inverse of `to_bits`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)
