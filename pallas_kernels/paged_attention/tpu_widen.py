"""Codes of narrow pages as what the MXU multiplies, by integer arithmetic that every TPU has; knows no attention.

No TPU before the seventh has fp8 in its vector unit, and the compiler's conversion makes NaN of some bits. This one
never does: whatever a page's unwritten part holds is a finite number, and
what is broken or not there shows in the scales alone.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_dtype import KVDtype

# A code is the widened number times this. e5m2's exponents keep their own bias (15) in bfloat16's field (127).
UNIT: dict[KVDtype, float] = {"int8": 1.0, "int4": 2.0**-4, "fp8_e4m3": 1.0, "fp8_e5m2": 2.0**112}
# What widened numbers are multiplied by times this, so that no product falls below the least float32.
LIFT: dict[KVDtype, float] = {"int8": 1.0, "int4": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 2.0**60}

_SIGNS = 0x8000_8000 - (1 << 32)


def widen(data: Array, dtype: KVDtype) -> Array:
    """bfloat16[keys, 2 * head_dim] of int8[keys, width], keys in the lower lanes and values in the upper.

    Exact, but for the subnormal numbers of e5m2, below 1e-9 of a token's largest, which count as 0.
    """
    if dtype == "int8":
        return data.astype(jnp.bfloat16)
    if dtype == "int4":  # a code c means c + 1/2: with c in a byte's upper half, 16 times that is the byte plus 8
        words = pltpu.bitcast(data, jnp.int32)
        halves = (words << 4, words)
        return jnp.concatenate([_bytes((half & _repeated(0xF0)) | _repeated(0x08)) for half in halves], axis=1)
    if dtype == "fp8_e4m3":  # subnormals reach far up: one channel 1000 times the others leaves these with little else
        words = data.astype(jnp.int32)
        y = pltpu.bitcast(((words & 0x7F) << 20) + ((127 - 7) << 23), jnp.float32)
        y = jnp.minimum(y, y + y - 2.0**-6)  # y itself, unless it is subnormal: then it was taken for (1 + m/8) / 128
        return pltpu.bitcast(pltpu.bitcast(y, jnp.int32) | (words & -(1 << 31)), jnp.float32).astype(jnp.bfloat16)
    # s eeeee mm, sign-extended, becomes s 000 eeeee mm 00000; two to a word
    words = pltpu.bitcast(data.astype(jnp.int16), jnp.int32)
    return pltpu.bitcast(((words << 5) & 0x0FE0_0FE0) | (words & _SIGNS), jnp.bfloat16)


def _repeated(byte: int) -> int:
    word = byte * 0x0101_0101
    return word - (1 << 32) if word >= 1 << 31 else word


def _bytes(words: Array) -> Array:
    return pltpu.bitcast(words, jnp.int8).astype(jnp.bfloat16)
