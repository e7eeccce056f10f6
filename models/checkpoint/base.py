"""What every checkpoint reader offers, and the one loop that turns stored tensors into arrays; knows no file format."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from models.config import ModelConfig
from models.errors import CheckpointError
from models.partition import Spread
from models.quantization import QuantizedMatrix, format_of, quantize

_LAYER = re.compile("[0-9]{1,9}")
LOAD_WORKERS = 4  # each holds one tensor in host memory; reading and casting release the GIL


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as its file declares it; the declaration was already checked against the file's size.

    Attributes:
      file: where it is stored.
      stored_name: the file's own name for it.
      shape: as the model wants it, `[out, in]`.
      read: brings the values into host memory, in any dtype numpy can cast; the array must not refer to a mapped file.
    """

    file: Path
    stored_name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]


class Checkpoint(Protocol):
    """An opened checkpoint: its configuration is parsed and its table of contents checked, no weight is read yet."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> frozenset[str]:
        """The canonical names of the stored parameters: Hugging Face's, without the `model.` prefix."""
        ...

    def load(
        self, expected: Mapping[str, jax.ShapeDtypeStruct], spreads: Mapping[str, Spread] | None = None
    ) -> dict[str, jax.Array]:
        """Reads every expected parameter once, in the expected dtype and, where one is given, sharding.

        Args:
          spreads: of the parameters whose expected shape is a split form, not the stored one.

        Raises:
          CheckpointError: a parameter is missing, left over, of another shape, or unreadable.
        """
        ...


def check_expected(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    spreads: Mapping[str, Spread] | None,
    where: Callable[[str], str],
) -> None:
    """Raises CheckpointError unless stored and expected parameters are the same, name by name and shape by shape.

    Args:
      path: the checkpoint.
      shapes: canonical name to stored shape.
      expected, spreads: see `Checkpoint.load`.
      where: the file and the file's own name of a stored parameter, for the message.
    """
    missing = sorted(expected.keys() - shapes.keys())
    if missing:
        raise CheckpointError(f"{path}: {_listed('tensor', missing)} missing: the model needs it and no file stores it")
    extra = sorted(shapes.keys() - expected.keys())
    if extra:
        named = _listed("tensor", [where(name) for name in extra])
        raise CheckpointError(f"{path}: {named} stored, but the model of this configuration has no place for it")
    for name, struct in expected.items():
        shape = spreads[name].stored_shape(struct.shape) if spreads and name in spreads else struct.shape
        if shapes[name] != shape:
            raise CheckpointError(
                f"{where(name)}: shape is {list(shapes[name])}, the configuration asks for {list(shape)}"
            )


def load_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    spreads: Mapping[str, Spread] | None,
) -> dict[str, jax.Array]:
    """Reads, casts and places `tensors`, a few at a time, so that the host never holds the model twice.

    Each device is sent its own part of a tensor, nothing else.

    Args:
      path: the checkpoint, for messages.
      tensors: by canonical name.
      expected, spreads: see `Checkpoint.load`; the same names and shapes, or CheckpointError.
    """

    def where(name: str) -> str:
        return f"{tensors[name].file}: {tensors[name].stored_name!r}"

    is_stored_narrow = any(name.endswith(".scales") for name in tensors)
    wide = expected if is_stored_narrow else widened(expected)
    check_expected(path, {name: tensor.shape for name, tensor in tensors.items()}, wide, spreads, where)

    def load_one(item: tuple[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        name, struct = item
        host = cast_in_range(tensors[name].read(), struct.dtype, where(name))
        if spreads and name in spreads:
            host = spreads[name].apply(host)
        assert host.shape == struct.shape, (name, host.shape, struct.shape)
        array = jax.block_until_ready(jax.device_put(host, struct.sharding))
        return {name: array} if is_stored_narrow else narrowed(name, array, expected)

    loaded: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(LOAD_WORKERS, thread_name_prefix="checkpoint") as pool:
        for arrays in pool.map(load_one, wide.items()):
            loaded |= arrays
    return loaded


def scales_of(name: str) -> str:
    """`layers.0.mlp.up_proj.weight` -> `layers.0.mlp.up_proj.scales`: there where the weight is expected quantized."""
    return name.removesuffix("weight") + "scales"


def zeros_of(name: str) -> str:
    return name.removesuffix("weight") + "zeros"


def widened(expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """What a checkpoint of wide weights must store for parameters of which some are expected quantized."""
    wide = {}
    for name, struct in expected.items():
        if name.endswith((".scales", ".zeros")):
            continue
        is_narrow = scales_of(name) in expected
        wide[name] = (
            jax.ShapeDtypeStruct(struct.shape, np.dtype(np.float32), sharding=struct.sharding) if is_narrow else struct
        )
    return wide


def narrowed(name: str, array: jax.Array, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """A loaded parameter as it is expected: itself, or its codes, scales and zeros, where it was, one at a time."""
    if scales_of(name) not in expected:
        return {name: array}
    parts = (name, scales_of(name), zeros_of(name))
    structs = [expected[part] for part in parts if part in expected]
    codes, scales = structs[:2]
    run = _quantizer(codes.dtype, scales.shape[1], scales.dtype, *(struct.sharding for struct in structs))
    matrix = run(array)
    arrays = jax.block_until_ready((matrix.codes, matrix.scales, matrix.zeros))
    return {part: value for part, value in zip(parts, arrays, strict=True) if value is not None}


@functools.cache
def _quantizer(
    code_dtype: Any, groups: int, scale_dtype: Any, *shardings: jax.sharding.Sharding | None
) -> Callable[[jax.Array], QuantizedMatrix]:
    """`quantize`, compiled once for each shape and place."""
    format = format_of(code_dtype)
    codes, scales, *zeros = shardings
    out = QuantizedMatrix(codes=codes, scales=scales, zeros=zeros[0] if zeros else None)  # type: ignore[arg-type]
    return jax.jit(
        partial(quantize, format=format, groups=groups, dtype=scale_dtype),
        out_shardings=None if codes is None else out,
    )


def cast_in_range(host: np.ndarray[Any, Any], dtype: Any, where: str) -> np.ndarray[Any, Any]:
    """Casts to the expected dtype; a finite weight beyond float16's range is an error, not an infinity."""
    if host.dtype == dtype:
        return host
    with np.errstate(over="ignore"):
        cast = host.astype(dtype)
    if dtype == np.float16 and (np.isinf(cast) & np.isfinite(host)).any():
        raise CheckpointError(f"{where}: a weight does not fit float16; load the model as bfloat16 or float32 (dtype)")
    return cast


def check_layers(path: Path, names: Iterable[str], num_layers: int, key: str) -> None:
    """Raises CheckpointError unless the stored layers are exactly 0 to num_layers - 1.

    This comes before anything is built from `num_layers`, so that a wild number costs nothing.
    """
    stored = {int(part) for part in (_layer_of(name) for name in names) if _LAYER.fullmatch(part)}
    if len(stored) == num_layers and (not stored or max(stored) == num_layers - 1):
        return
    absent = next(index for index in range(len(stored) + 1) if index not in stored)
    if absent < num_layers:
        raise CheckpointError(f"{path}: {key} is {num_layers}, but no tensor of layer {absent} is stored")
    raise CheckpointError(f"{path}: {key} is {num_layers}, but tensors of layer {max(stored)} are stored")


def _layer_of(name: str) -> str:
    return name.split(".", 2)[1] if name.startswith("layers.") else ""


def _listed(noun: str, names: list[str]) -> str:
    """`tensor x is`, or `tensors x, y and 7 more are`."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{noun} {shown} is" if len(names) == 1 else f"{noun}s {shown} are"
