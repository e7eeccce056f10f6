"""Keys and values that are hard on narrow formats, and how far an answer may be from that of the exact numbers.

The bound. A key that is off by dk moves its score by at most e = scale |q| |dk|. When every score s may move by its own
e, the softmax weight w of a key lies between two numbers:

    low  = exp(s - e) / (exp(s - e) + sum over the others of exp(s + e))
    high = exp(s + e) / (exp(s + e) + sum over the others of exp(s - e))

and the output moves by at most

    sum of high |dv|  +  sum of max(high - w, w - low) |v|

where |dk| and |dv| are what the format promises of each vector (`step_bound`): nothing is measured.
"""

from dataclasses import replace

import numpy as np
from cases import AttentionCase, AttentionInputs, HostArray, decode_rows, make_inputs, reference, rounded, visible
from kv_format_reference import LARGEST, NARROW

from pallas_kernels.kv_dtype import KVDtype

ROUNDING = 2.0**-21  # of a float32 sum of products, relative to the sum of their magnitudes
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of a weighted mean, relative to the largest value of its channel
STRESSES = ("channel", "small_keys", "large_keys", "zeros", "long")

STRESS_CASES = tuple(
    AttentionCase(
        name=f"{stress}_{dtype}",
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=16,
        queries=1,
        rows=decode_rows(4096, 0, 4095) if stress == "long" else decode_rows(0, 1, 40, 17, 150),
        kv_dtype=dtype,
    )
    for dtype in NARROW
    for stress in STRESSES
)


def stress_inputs(case: AttentionCase) -> AttentionInputs:
    """The case's inputs, made hard as its name says."""
    inputs = make_inputs(case)
    k, v = inputs.k_pages.copy(), inputs.v_pages.copy()
    match case.name.removesuffix(f"_{case.kv_dtype}"):
        case "channel":
            k[..., 3] *= 1000
            v[..., 5] *= 1000
        case "small_keys":
            k *= 0.01
        case "large_keys":
            k *= 100
        case "zeros":
            k[..., ::2, :] *= 0  # every other token; NaN stays NaN
            v[:, :, 1::3] *= 0
    return replace(inputs, k_pages=k, v_pages=v)


def assert_stays_in_bounds(case: AttentionCase, inputs: AttentionInputs, out: HostArray) -> None:
    """A backend's output: what its pages say within its own rounding, and what was written within the bound."""
    stored, exact = rounded(case, inputs), replace(inputs, q=rounded(case, inputs).q)
    own = own_rounding(case, stored)
    for expected, allowed in (
        (reference(case, stored), own),
        (reference(case, exact), own + error_bound(case, exact)),
    ):
        real = ~np.isnan(expected)
        excess = np.abs(out - expected)[real] - allowed[real]
        assert (excess <= 0).all(), f"{excess.max():.3g} above the bound"


def own_rounding(case: AttentionCase, stored: AttentionInputs) -> HostArray:
    """[rows, queries, heads, head_dim]: what a backend's arithmetic may add to what its pages say."""
    bound = np.zeros(stored.q.shape)
    for row, i, head, keys, values in visible(case, stored):
        largest = np.abs(values).max(0)
        magnitude = (np.abs(keys) @ np.abs(stored.q[row, i, head]) * stored.scale).max()
        bound[row, i, head] = largest * (TOLERANCE[case.dtype] + np.expm1(2 * ROUNDING * magnitude))
    return bound


def error_bound(case: AttentionCase, inputs: AttentionInputs) -> HostArray:
    """[rows, queries, heads, head_dim]: see above."""
    bound = np.zeros(inputs.q.shape)
    for row, i, head, keys, values in visible(case, inputs):
        q = inputs.q[row, i, head].astype(np.float64)
        off = inputs.scale * np.linalg.norm(q) * np.linalg.norm(step_bound(keys, case.cache_dtype), axis=-1)
        scores = keys @ q * inputs.scale
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        high, low = share(scores + off, scores - off), share(scores - off, scores + off)
        moved = np.maximum(high - weights, weights - low)
        value_off = step_bound(values, case.cache_dtype)
        if case.cache_dtype == "int4":
            value_off = np.maximum(value_off, 0.2 * np.abs(values).max(-1, keepdims=True))  # the largest may be cut
        bound[row, i, head] = high @ value_off + moved @ np.abs(values)
    return bound


def share(own: HostArray, others: HostArray) -> HostArray:
    """[keys]: the softmax weight of each key with its `own` score among the `others` of all the others."""
    if len(own) == 1:
        return np.ones(1)
    top = np.argmax(others)
    rest = np.exp(others - others[top])
    rest = rest.sum() - rest
    rest[top] = 1.0  # here the difference would be of equal numbers
    log_rest = others[top] + np.log(rest)
    without = np.delete(others, top)
    log_rest[top] = without.max() + np.log(np.exp(without - without.max()).sum())
    return np.asarray(1 / (1 + np.exp(np.clip(log_rest - own, -700, 700))))


def step_bound(x: HostArray, dtype: KVDtype) -> HostArray:
    """[..., n]: how far each number of a vector may lie from its own in the format.

    Half a step, where steps are the scale's, rounded up by less than one part in 128, or a float's of 3 or 2 bits.
    int4 may cut a vector's largest numbers; the norm of its error is then less than that of these bounds.
    """
    scale = np.abs(x).max(-1, keepdims=True) / LARGEST[dtype] * (1 + 2**-7)
    match dtype:
        case "fp8_e4m3":
            return np.maximum(np.abs(x) * 2.0**-4, scale * 2.0**-10)
        case "fp8_e5m2":
            return np.maximum(np.abs(x) * 2.0**-3, scale * 2.0**-17)
        case _:
            return np.broadcast_to(scale / 2, x.shape)
