"""Quantized matrices as compressed-tensors, GPTQ and AWQ store them: their configuration and packing, in numpy alone.

Whatever the scheme, three tensors come of a matrix: codes [out, in], scales and zero points [out, groups], by the names
that the model has for them. Stored codes count from 0; ours are signed, so codes and zero points move down by half.

Sources: github.com/vllm-project/compressed-tensors (pack-quantized, int-quantized, float-quantized), GPTQModel's
`qweight` of [in / 8, out] and `g_idx` of [in], AutoAWQ's `gemm` layout of [in, out / 8], which interleaves the columns
of a word.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from models.checkpoint.base import StoredTensor
from models.checkpoint.fields import Fields
from models.config import Quantization
from models.errors import CheckpointError, UnsupportedModelError

HostArray = np.ndarray[Any, Any]
Method = Literal["pack-quantized", "plain", "gptq", "awq"]

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight in a word, from its lowest bits up
_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedScheme:
    """How a checkpoint's quantized matrices are stored.

    Attributes:
      zero_offset: added to a stored zero point: 1 where GPTQ's first format stores it less one.
      is_reordered: inputs may lie in groups in another order, which only the tensors `g_idx` tell.
    """

    method: Method
    bits: int
    quantization: Quantization
    zero_offset: int = 0
    is_reordered: bool = False


def read_scheme(fields: Fields) -> PackedScheme:
    """From the object `quantization_config`. Raises CheckpointError or UnsupportedModelError naming the key."""
    method = fields.text("quant_method")
    match method:
        case "gptq":
            return _read_gptq(fields)
        case "awq":
            return _read_awq(fields)
        case "compressed-tensors":
            return _read_compressed_tensors(fields)
    raise UnsupportedModelError(
        f"{fields.source}: quant_method {method!r}; read are compressed-tensors, gptq and awq; or give the model that "
        f"it was made of, and model.quantization"
    )


def _read_gptq(fields: Fields) -> PackedScheme:
    layout = fields.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(f"{fields.source}: checkpoint_format {layout!r}; read are gptq and gptq_v2")
    if (word := fields.text("pack_dtype", "int32")) != "int32":
        raise UnsupportedModelError(f"{fields.source}: pack_dtype {word!r}; words of int32 are read")
    bits = _bits(fields, "bits", (4, 8))
    return PackedScheme(
        method="gptq",
        bits=bits,
        quantization=_integers(bits, _group_size(fields, "group_size"), has_zeros=True),
        zero_offset=1 if layout == "gptq" else 0,
        is_reordered=fields.flag("desc_act", False),
    )


def _read_awq(fields: Fields) -> PackedScheme:
    version = fields.text("version", "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{fields.source}: version {version!r}; of AWQ's layouts gemm is read")
    bits = _bits(fields, "bits", (4,))
    return PackedScheme(
        method="awq", bits=bits, quantization=_integers(bits, _group_size(fields, "group_size"), has_zeros=True)
    )


def _read_compressed_tensors(fields: Fields) -> PackedScheme:
    if fields.values.get("transform_config"):
        raise UnsupportedModelError(f"{fields.source}: transform_config: turned weights are not implemented")
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnsupportedModelError(f"{fields.source}: config_groups must be one group that all layers share")
    (name, group) = next(iter(groups.items()))
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise UnsupportedModelError(f"{fields.source}: config_groups.{name}.weights is missing")
    inner = Fields(source=f"{fields.source}: config_groups.{name}.weights", values=weights)
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise UnsupportedModelError(f"{inner.source}: actorder {weights['actorder']!r} is not implemented")
    strategy, kind = inner.text("strategy", "channel"), inner.text("type", "int")
    if strategy not in ("tensor", "channel", "group"):
        raise UnsupportedModelError(f"{inner.source}: strategy {strategy!r}; read are tensor, channel and group")
    layout = fields.text("format", "")
    if kind == "float":
        _bits(inner, "num_bits", (8,))
        if layout not in ("float-quantized", "naive-quantized") or strategy == "group":
            raise UnsupportedModelError(f"{fields.source}: format {layout!r}, {strategy}; fp8 is read by row or tensor")
        return PackedScheme(method="plain", bits=8, quantization=Quantization(format="fp8_e4m3"))
    bits = _bits(inner, "num_bits", (4, 8))
    group_size = _group_size(inner, "group_size") if strategy == "group" else None
    has_zeros = not inner.flag("symmetric", True)
    if layout == "pack-quantized":
        method: Method = "pack-quantized"
    elif layout in ("int-quantized", "naive-quantized") and bits == 8 and not has_zeros:
        method = "plain"
    else:
        raise UnsupportedModelError(
            f"{fields.source}: format {layout!r} of {bits} bits; read are pack-quantized, and int-quantized of 8 bits"
        )
    return PackedScheme(method=method, bits=bits, quantization=_integers(bits, group_size, has_zeros=has_zeros))


def _integers(bits: int, group_size: int | None, *, has_zeros: bool) -> Quantization:
    return Quantization(format="int4" if bits == 4 else "int8", group_size=group_size, has_zeros=has_zeros)


def _bits(fields: Fields, key: str, known: tuple[int, ...]) -> int:
    bits = fields.count(key)
    if bits not in known:
        raise UnsupportedModelError(f"{fields.source}: {key} is {bits}; read are {' and '.join(map(str, known))}")
    return bits


def _group_size(fields: Fields, key: str) -> int | None:
    """-1 and null mean a whole row."""
    return None if fields.values.get(key) in (-1, None) else fields.count(key)


def unpack_tensors(tensors: Mapping[str, StoredTensor], scheme: PackedScheme) -> dict[str, StoredTensor]:
    """The stored tensors by canonical name, with those of each quantized matrix in place of its packed ones.

    Raises:
      CheckpointError: a matrix lacks its scales or zero points, or their shapes do not fit.
      UnsupportedModelError: a layer's matrix is not quantized, though others are.
    """
    codes_name, scales_name, zeros_name = {
        "pack-quantized": ("weight_packed", "weight_scale", "weight_zero_point"),
        "plain": ("weight", "weight_scale", ""),
        "gptq": ("qweight", "scales", "qzeros"),
        "awq": ("qweight", "scales", "qzeros"),
    }[scheme.method]
    unpacked: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith("_proj") or part == "bias":
            unpacked[name] = tensor
            continue
        if part == "weight" and part != codes_name:
            raise UnsupportedModelError(
                f"{tensor.file}: {tensor.stored_name!r} is not quantized; either all layers' matrices are, or none"
            )
        if part != codes_name:
            continue  # it comes with its codes
        scales = _beside(tensors, tensor, stem, scales_name)
        zeros = _beside(tensors, tensor, stem, zeros_name) if scheme.quantization.has_zeros else None
        unpacked |= _matrix(stem, tensor, scales, zeros, scheme)
        if scheme.method == "gptq" and (scheme.is_reordered or f"{stem}.g_idx" in tensors):
            features_in = unpacked[f"{stem}.weight"].shape[1]
            _check_order(_beside(tensors, tensor, stem, "g_idx"), scheme, features_in)
    return unpacked


def _beside(tensors: Mapping[str, StoredTensor], codes: StoredTensor, stem: str, part: str) -> StoredTensor:
    if f"{stem}.{part}" not in tensors:
        raise CheckpointError(f"{codes.file}: {codes.stored_name!r} is quantized, but '{stem}.{part}' is not stored")
    return tensors[f"{stem}.{part}"]


def _check_order(g_idx: StoredTensor, scheme: PackedScheme, features_in: int) -> None:
    """Raises UnsupportedModelError unless groups are runs of inputs. The flag desc_act does not tell: with
    static_groups they are, whatever the order in which inputs were rounded."""
    if g_idx.shape != (features_in,):
        raise CheckpointError(
            f"{g_idx.file}: {g_idx.stored_name!r} has shape {list(g_idx.shape)}; it takes a group for each of "
            f"{features_in} inputs"
        )
    if not np.array_equal(g_idx.read(), np.arange(features_in) // (scheme.quantization.group_size or features_in)):
        raise UnsupportedModelError(
            f"{g_idx.file}: {g_idx.stored_name!r} puts inputs into groups in an order of their own, which is not "
            f"implemented; quantize without desc_act, or with static_groups"
        )


def _matrix(
    stem: str, codes: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None, scheme: PackedScheme
) -> dict[str, StoredTensor]:
    """Codes, scales and zero points of a matrix, as the model names them."""
    in_a_word = _WORD_BITS // scheme.bits
    rows, columns = codes.shape
    match scheme.method:
        case "pack-quantized":
            out, features_in = rows, columns * in_a_word
        case "gptq":
            out, features_in = columns, rows * in_a_word
        case "awq":
            out, features_in = columns * in_a_word, rows
        case "plain":
            out, features_in = rows, columns
    group_size = scheme.quantization.group_size or features_in
    if features_in % group_size:
        raise CheckpointError(
            f"{codes.file}: {codes.stored_name!r} has {features_in} inputs; group_size {group_size} does not fit"
        )
    groups = features_in // group_size
    if int(np.prod(scales.shape)) not in (out * groups, 1 if groups == 1 else out * groups):
        raise CheckpointError(
            f"{scales.file}: {scales.stored_name!r} has shape {list(scales.shape)}; {out} rows of {groups} groups need "
            f"{out * groups} scales"
        )
    by_input = scheme.method in ("gptq", "awq")  # [groups, out]
    words = -(-out // in_a_word)
    zeros_shape = (groups, words) if by_input else (words, groups)
    if zeros is not None and zeros.shape != zeros_shape:
        raise CheckpointError(
            f"{zeros.file}: {zeros.stored_name!r} has shape {list(zeros.shape)}; {out} rows of {groups} groups need "
            f"{list(zeros_shape)}"
        )

    def read_scales() -> HostArray:
        values = scales.read().astype(np.float32)
        values = values.T if by_input else values.reshape(-1, groups)
        return np.ascontiguousarray(np.broadcast_to(values, (out, groups)))

    def read_zeros() -> HostArray:
        assert zeros is not None
        packed = zeros.read()
        if scheme.method == "pack-quantized":
            stored = _unpack(packed, scheme.bits, axis=0)[:out]
        else:
            stored = _unpack(_plus(packed, scheme), scheme.bits, axis=1, awq=scheme.method == "awq").T[:out]
        return (stored.astype(np.float32) - _half(scheme.bits)).reshape(out, groups)

    matrix = {
        f"{stem}.weight": replace(codes, shape=(out, features_in), read=_codes_reader(codes, scheme)),
        f"{stem}.scales": replace(scales, shape=(out, groups), read=read_scales),
    }
    if zeros is not None:
        matrix[f"{stem}.zeros"] = replace(zeros, shape=(out, groups), read=read_zeros)
    return matrix


def _codes_reader(codes: StoredTensor, scheme: PackedScheme) -> Callable[[], HostArray]:
    narrow = ml_dtypes.int4 if scheme.bits == 4 else np.int8

    def read() -> HostArray:
        if scheme.method == "plain":
            return codes.read()
        axis = 0 if scheme.method == "gptq" else 1
        stored = _unpack(codes.read(), scheme.bits, axis=axis, awq=scheme.method == "awq")
        signed = (stored.astype(np.int16) - _half(scheme.bits)).astype(np.int8)
        return np.ascontiguousarray(signed.T if scheme.method in ("gptq", "awq") else signed).astype(narrow)

    return read


def _plus(words: HostArray, scheme: PackedScheme) -> HostArray:
    """Words with the offset added to every number in them, as GPTQModel does: it subtracts from whole words, so that a
    zero point of 0 borrows from its neighbour, and adds to whole words.
    """
    each = sum(scheme.zero_offset << shift for shift in range(0, _WORD_BITS, scheme.bits))
    return (words.view(np.uint32) + np.uint32(each)).view(np.int32)


def _half(bits: int) -> int:
    return 1 << (bits - 1)


def _unpack(words: HostArray, bits: int, *, axis: int, awq: bool = False) -> HostArray:
    """uint8 codes of int32 words, which hold consecutive ones along `axis`, the first in the lowest bits.

    >>> _unpack(np.array([[0x76543210]], np.int32), 4, axis=1)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    shifts = np.arange(0, _WORD_BITS, bits, dtype=np.uint32)
    parts = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    if awq:
        parts = parts[..., np.argsort(_AWQ_COLUMNS)]
    parts = parts.astype(np.uint8)
    if axis == 0:
        return parts.transpose(0, 2, 1).reshape(-1, words.shape[1])
    return parts.reshape(words.shape[0], -1)
