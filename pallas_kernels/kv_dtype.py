"""The formats that keys and values may have in a page, by name and in bytes; does not load jax, unlike `kv_format`."""

from typing import Literal

KVDtype = Literal["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]

SCALE_BYTES = 2  # a bfloat16 for each token, KV head and half
_BITS: dict[KVDtype, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "int4": 4,
}


def is_quantized(dtype: KVDtype) -> bool:
    """Whether pages of this format have scales."""
    return _BITS[dtype] <= 8


def token_bytes(kv_heads: int, head_dim: int, dtype: KVDtype) -> int:
    """Bytes that one token's keys and values take in one layer, scales included."""
    return 2 * kv_heads * (head_dim * _BITS[dtype] // 8 + SCALE_BYTES * is_quantized(dtype))
