"""The narrow KV formats by their description, in float64 and one number at a time; knows nothing of `kv_format`."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.kv_dtype import KVDtype

HostArray = np.ndarray[Any, Any]

NARROW: tuple[KVDtype, ...] = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")

# Every number that a code can mean, by code.
_INT8 = np.arange(256, dtype=np.uint8)
NUMBERS: dict[KVDtype, HostArray] = {
    "int8": _INT8.view(np.int8).astype(np.float64),
    "int4": _INT8.view(np.int8).astype(np.float64) + 0.5,
    "fp8_e4m3": _INT8.view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "fp8_e5m2": _INT8.view(ml_dtypes.float8_e5m2).astype(np.float64),
}
# The largest that is used: int8's -128 and fp8_e5m2's infinity are not.
LARGEST: dict[KVDtype, float] = {"int8": 127.0, "int4": 7.5, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}

OTHER_SCALES: dict[KVDtype, tuple[float, ...]] = {"int4": (0.9, 0.8), "fp8_e5m2": (299 / 256, 359 / 256, 7 / 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """Vectors in a narrow format.

    Attributes:
      codes: int8[..., n].
      scales: int16[...], the bits of bfloat16.
    """

    codes: HostArray
    scales: HostArray


def quantized(x: HostArray, dtype: KVDtype) -> Quantized:
    """[..., n] in the format: a scale that just holds the largest, then for each number the nearest there is.

    Of that scale and the others of `OTHER_SCALES`, each vector takes the one with the least squared error.
    """
    x = np.nan_to_num(x.astype(np.float64), posinf=3e38, neginf=-3e38)
    whole = rounded_up(np.abs(x).max(-1) / LARGEST[dtype])
    best = with_scales(x, whole, dtype)
    for factor in OTHER_SCALES.get(dtype, ()):
        other = with_scales(x, rounded_up(whole.astype(np.float64) * factor), dtype)
        theirs, ours = (np.square(dequantized(stored, dtype) - x).sum(-1) for stored in (other, best))
        best = Quantized(
            codes=np.where((theirs < ours)[..., None], other.codes, best.codes),
            scales=np.where(theirs < ours, other.scales, best.scales),
        )
    return best


def rounded_up(x: HostArray) -> HostArray:
    """The least bfloat16 that is no smaller."""
    nearest = x.astype(ml_dtypes.bfloat16)
    return np.where(nearest.astype(np.float64) < x, np.nextafter(nearest, ml_dtypes.bfloat16(np.inf)), nearest)


def with_scales(x: HostArray, scales: HostArray, dtype: KVDtype) -> Quantized:
    """[..., n] in the format with these bfloat16 scales."""
    scale = scales.astype(np.float64)[..., None]
    used = np.abs(NUMBERS[dtype]) <= LARGEST[dtype]
    codes, numbers = np.flatnonzero(used), NUMBERS[dtype][used]
    order = np.argsort(numbers, kind="stable")
    codes, numbers = codes[order], numbers[order]
    wanted = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
    nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, wanted)
    return Quantized(codes=codes[nearest].astype(np.uint8).view(np.int8), scales=scales.view(np.int16))


def dequantized(stored: Quantized, dtype: KVDtype) -> HostArray:
    """float32[..., n]: the numbers that are meant, exactly (a code has at most 8 significant bits, a scale 8)."""
    scales = stored.scales.view(ml_dtypes.bfloat16).astype(np.float64)
    return (NUMBERS[dtype][stored.codes.view(np.uint8)] * scales[..., None]).astype(np.float32)
