"""Products with int8 and int4 matrices on the CPU: `cpu.c` as an XLA custom call, compiled on its first use."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.native import HEADERS, CustomCall

SOURCES = [*(Path(__file__).with_name(name) for name in ("cpu.c", "cpu_bytes.h", "cpu_check.h")), *HEADERS]
GROUP = 32  # inputs of a token that share a scale, as in C
MOST_DIFFERENCE = 2e-5  # of the self-check, whose answers are of the order of 1
SCALE_DTYPES = ("float32", "bfloat16")

# One expression at several places has to give the same bits.
_CALL = CustomCall("quantized_matmul", SOURCES, most_difference=MOST_DIFFERENCE, contracts=False)
prepare = _CALL.prepare


def unsupported(*, code_dtype: str, scale_dtype: str, group_size: int | None, features_in: int) -> str | None:
    """Why this kernel cannot multiply with such a matrix; None where it can.

    Args:
      group_size: inputs that share a scale of the matrix; None: all of a row.
    """
    if code_dtype not in ("int8", "int4"):
        return f"the codes are {code_dtype}, not int8 or int4"
    if scale_dtype not in SCALE_DTYPES:
        return f"the scales are {scale_dtype}, not {' or '.join(SCALE_DTYPES)} (model.dtype)"
    if group_size is not None and group_size % GROUP:
        told = "the checkpoint's, or else model.quantization_group_size"
        return f"groups of {group_size} ({told}) are no multiple of {GROUP}"
    if features_in % GROUP:
        return f"a matrix has {features_in} inputs, no multiple of {GROUP}"
    return None


def quantized_matmuls(x: Array, matrices: Sequence[tuple[Array, Array, Array | None]]) -> tuple[Array, ...]:
    """[tokens, in] times each [out, in] -> [tokens, out] each: a weight is (code - zero) * scale.

    Every 32 inputs of a token are rounded to one of 255 even steps between their own -largest and largest, as
    llama.cpp does; their products with the codes are exact, and sums of groups are added in float32. An answer depends
    on its token and its output alone, to the bit. A token that is not finite has answers that are not.

    Args:
      x: any float.
      matrices: 1 to 4 of one form, apart from their outputs. Codes: int8 or int4[out, in]; scales: float32 or
        bfloat16[out, groups]; zeros: likewise, None: all are 0.
    """
    codes, scales, _ = matrices[0]
    assert len({(c.dtype, c.shape[1], s.dtype, s.shape[1], z is None) for c, s, z in matrices}) == 1
    for c, s, z in matrices:
        assert s.shape[0] == c.shape[0]
        assert z is None or (z.dtype, z.shape) == (s.dtype, s.shape), "zeros unlike scales"
    features_in, groups = codes.shape[1], scales.shape[1]
    assert x.shape[1] == features_in
    assert features_in % groups == 0, f"{features_in} inputs, {groups} groups"
    refusal = unsupported(
        code_dtype=str(codes.dtype),
        scale_dtype=str(scales.dtype),
        group_size=features_in // groups,
        features_in=features_in,
    )
    assert refusal is None, refusal  # C trusts these numbers, and divides by some
    results = [jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32) for codes, _, _ in matrices]
    no_zeros = jnp.zeros((0, 0), scales.dtype)
    outs = jax.ffi.ffi_call(_CALL.target, results)(
        x.astype(jnp.float32),
        *(part for c, s, z in matrices for part in (c, s, no_zeros if z is None else z)),
        is_int4=np.int32(codes.dtype == jnp.int4),
        is_bfloat16=np.int32(scales.dtype == jnp.bfloat16),
    )
    return tuple(out.astype(x.dtype) for out in outs)
