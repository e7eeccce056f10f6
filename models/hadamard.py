"""Turns heads so that no channel stands out: what 4 bits need to hold keys and values; knows neither pages nor kernels.

A vector whose largest number is many times its others loses the others when 16 steps must span them all. A normalised
Hadamard matrix spreads every number evenly over its vector (QuaRot, Ashkboos et al. 2024): the largest shrinks, the
length stays. As the matrix is orthogonal and its own inverse, queries and keys that are both turned keep their scores,
and turned values give the turned output.

    [8, 0, 0, 0]  <->  [4, 4, 4, 4]
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def turn(x: Array) -> Array:
    """[..., head_dim] times the Hadamard matrix, computed in float32 and returned in x's dtype; its own inverse.

    Where head_dim is no power of two, the largest one that divides it is the width of blocks that turn by themselves:
    16 of 80, 32 of 96.
    """
    head_dim = x.shape[-1]
    width = head_dim & -head_dim
    bits = np.array([[(row & column).bit_count() for column in range(width)] for row in range(width)])
    matrix = jnp.asarray((1.0 - 2.0 * (bits % 2)) / width**0.5, jnp.float32)  # Sylvester's form, symmetric
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], head_dim // width, width)
    turned = jnp.matmul(blocks, matrix, precision=jax.lax.Precision.HIGHEST)
    return turned.reshape(x.shape).astype(x.dtype)
