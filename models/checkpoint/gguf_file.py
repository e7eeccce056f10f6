"""The GGUF container: metadata and a table of tensors, checked against the file's size; knows no model.

Follows the GGUF specification, versions 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The `gguf`
package's own reader trusts every length it finds and spends seconds on a vocabulary, so only its tables are used here.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from models.errors import CheckpointError, UnsupportedModelError

SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"),
    )
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """Where a tensor lies and how it is coded.

    Attributes:
      shape: outermost dimension first, as numpy counts (the file counts the other way).
      offset: bytes from the start of the file.
      num_bytes: inside the file, and shared with no other tensor.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """An opened file. The mapping lives as long as this object and the views that `data` gave out.

    Attributes:
      metadata: strings, numbers, booleans and lists of them, by key.
      tensors: by the file's own names.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._mapped = mapped

    def data(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes, uint8[rows, bytes per row]: a view of the mapped file, to be copied and let go."""
        flat = np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GGUFFile:
    """Reads metadata and tensor table; no tensor data is touched.

    Raises:
      CheckpointError: not a GGUF file, cut short, or with lengths and offsets that its size contradicts.
      UnsupportedModelError: another version, byte order, tensor type, or one part of a split file.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it does not begin with {_MAGIC.decode()!r})")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    cursor = _Cursor(path, mapped, len(_MAGIC))
    version = int(cursor.scalar("<u4"))
    if version not in _VERSIONS:
        raise UnsupportedModelError(f"{path}: GGUF version {version}; versions {_VERSIONS} are read, little-endian")
    num_tensors, num_keys = int(cursor.scalar("<u8")), int(cursor.scalar("<u8"))
    metadata = dict(_unique(path, "key", (_read_key(cursor) for _ in range(num_keys))))
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{path}: one of {metadata['split.count']} parts of a split file; join them with llama-gguf-split --merge"
        )
    table = dict(_unique(path, "tensor", (_read_tensor(cursor) for _ in range(num_tensors))))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; it must be a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: _place(path, name, entry, data_start, alignment, len(mapped)) for name, entry in table.items()}
    _check_overlaps(path, tensors)
    return GGUFFile(path, mapped, metadata, tensors)


class _Cursor:
    """A position in the mapped header that refuses to pass the file's end."""

    def __init__(self, path: Path, mapped: mmap.mmap, position: int) -> None:
        self.path = path
        self.position = position
        self._mapped = mapped

    def take(self, count: int, what: str) -> bytes:
        left = len(self._mapped) - self.position
        if count > left:
            raise CheckpointError(f"{self.path}: {what} asks for {count} bytes at {self.position}, {left} are left")
        start, self.position = self.position, self.position + count
        return self._mapped[start : self.position]

    def scalar(self, code: str) -> Any:
        value = self.array(code, 1, "the header")[0]
        # The shortest decimal that is the same float32: the 1e-05 that a converter wrote, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if code == "<f4" else value

    def array(self, code: str, count: int, what: str) -> list[Any]:
        dtype = np.dtype(code)
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
        return values

    def text(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self.take(8, what))
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8: {error}") from None


def _read_key(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.text("a metadata key")
    kind = int(cursor.scalar("<u4"))
    if kind == _STRING:
        return key, cursor.text(key)
    if kind in _SCALARS:
        return key, cursor.scalar(_SCALARS[kind])
    if kind == _ARRAY:
        element, count = int(cursor.scalar("<u4")), int(cursor.scalar("<u8"))
        if element in _SCALARS:
            return key, cursor.array(_SCALARS[element], count, key)
        if element == _STRING:  # each takes at least its length's 8 bytes, so a lying count ends at the file's end
            return key, [cursor.text(key) for _ in range(count)]
        raise UnsupportedModelError(f"{cursor.path}: {key} is an array of GGUF value type {element}")
    raise UnsupportedModelError(f"{cursor.path}: {key} has the unknown GGUF value type {kind}")


_TableEntry = tuple[tuple[int, ...], int, int]


def _read_tensor(cursor: _Cursor) -> tuple[str, _TableEntry]:
    """Name, then (shape, type number, offset from the start of the data)."""
    name = cursor.text("a tensor's name")
    num_dims = int(cursor.scalar("<u4"))
    if not 1 <= num_dims <= _MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: {name!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are possible")
    dims = cursor.array("<u8", num_dims, name)
    return name, (tuple(reversed(dims)), int(cursor.scalar("<u4")), int(cursor.scalar("<u8")))


def _unique(path: Path, noun: str, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for name, value in pairs:
        if name in seen:
            raise CheckpointError(f"{path}: {noun} {name!r} is stored twice")
        seen.add(name)
        yield name, value


def _place(path: Path, name: str, entry: _TableEntry, start: int, alignment: int, size: int) -> GGUFTensor:
    """Turns a table entry into a place in the file, in Python's integers, which do not overflow.

    Args:
      start: where the data begins, bytes.
      size: the file's, bytes.
    """
    shape, type_number, offset = entry
    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError:
        raise UnsupportedModelError(f"{path}: {name!r} has the unknown tensor type {type_number}") from None
    if kind not in SUPPORTED_TYPES:
        supported = ", ".join(kind.name for kind in sorted(SUPPORTED_TYPES))
        raise UnsupportedModelError(f"{path}: {name!r} has tensor type {kind.name}; supported are {supported}")
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block_size:
        raise CheckpointError(f"{path}: {name!r} has shape {list(shape)}; {kind.name} codes {block_size} at a time")
    num_bytes = prod(shape) // block_size * block_bytes
    if offset % alignment:
        raise CheckpointError(f"{path}: {name!r} lies at {offset}, not at a multiple of general.alignment, {alignment}")
    if start + offset + num_bytes > size:
        raise CheckpointError(
            f"{path}: {name!r}, {kind.name} {list(shape)}, would end at byte {start + offset + num_bytes}; "
            f"the file has {size}"
        )
    return GGUFTensor(name=name, type=kind, shape=shape, offset=start + offset, num_bytes=num_bytes)


def _check_overlaps(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: {tensor.name!r} shares bytes with {last!r}")
        end, last = tensor.offset + tensor.num_bytes, tensor.name
