"""Reads a Hugging Face folder's `*.safetensors`, one file or shards with an index; knows no configuration key."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from models.checkpoint.base import StoredTensor, check_layers, load_tensors
from models.checkpoint.hf_config import read_hf_config, read_json, read_quantization
from models.checkpoint.packed import unpack_tensors
from models.errors import CheckpointError, UnsupportedModelError
from models.partition import Spread

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIX = "model."

_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_PACKED_DTYPES = frozenset({"I8", "I32", "I64", "F8_E4M3"})  # of quantized matrices, if the configuration says so
# Rotary tables that early Llama conversions stored beside the weights; they follow from the configuration.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class SafetensorsCheckpoint:
    """A Hugging Face folder. The shards stay mapped as long as this object lives; loaded arrays are copies."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError or UnsupportedModelError; reads headers and JSON only."""
        self.path = folder
        scheme = read_quantization(folder)
        self._tensors = _index_tensors(folder, _DTYPES if scheme is None else _DTYPES | _PACKED_DTYPES)
        config = read_hf_config(folder, stores_head="lm_head.weight" in self._tensors)
        if scheme is not None:
            self._tensors = unpack_tensors(self._tensors, scheme)
            config = replace(config, quantization=scheme.quantization)
        self.config = config
        check_layers(folder, self._tensors, self.config.num_layers, "num_hidden_layers")

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def load(
        self, expected: Mapping[str, jax.ShapeDtypeStruct], spreads: Mapping[str, Spread] | None = None
    ) -> dict[str, jax.Array]:
        return load_tensors(self.path, self._tensors, expected, spreads)


def _index_tensors(folder: Path, dtypes: frozenset[str]) -> dict[str, StoredTensor]:
    """Canonical name to tensor, each named once and stored exactly where the index says."""
    tensors: dict[str, StoredTensor] = {}
    for file, promised in sorted(_shards(folder).items()):
        stored = _file_tensors(file, dtypes)
        if promised is not None:
            _check_promise(folder, file, stored.keys(), promised)
        for name, tensor in stored.items():
            if _DERIVED.fullmatch(name):
                continue
            canonical = name.removeprefix(PREFIX)
            if canonical in tensors:
                other = tensors[canonical]
                raise CheckpointError(
                    f"{file}: tensor {name!r} is also stored in {other.file.name}, as {other.stored_name!r}"
                )
            tensors[canonical] = tensor
    return tensors


def _shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Each file to read and the tensors that the index promises in it (None: a single file promises nothing)."""
    if (folder / SINGLE_FILE).exists():
        return {folder / SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.exists():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{folder}: its weights are pickles ({', '.join(pickles[:3])}), which can run code when opened; "
                f"convert them to safetensors"
            )
        raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    promised: dict[Path, set[str]] = {}
    for name, file_name in weight_map.items():
        promised.setdefault(_inside(folder, index, name, file_name), set()).add(name)
    return {file: frozenset(names) for file, names in promised.items()}


def _inside(folder: Path, index: Path, name: str, file_name: Any) -> Path:
    """The shard's path; links inside the folder may lead elsewhere (download caches do so), the index may not."""
    parts = PurePosixPath(file_name).parts if isinstance(file_name, str) else ()
    if not parts or file_name.startswith("/") or ".." in parts or "\\" in file_name or "\0" in file_name:
        raise CheckpointError(
            f"{index}: tensor {name!r} is mapped to {file_name!r}, which is no file inside the folder"
        )
    return folder.joinpath(*parts)


def _check_promise(folder: Path, file: Path, stored: Any, promised: frozenset[str]) -> None:
    if absent := sorted(promised - stored):
        raise CheckpointError(f"{file}: tensor {absent[0]!r} is missing; {INDEX_FILE} says it is here")
    if unnamed := sorted(stored - promised):
        raise CheckpointError(f"{file}: tensor {unnamed[0]!r} is stored here, but {INDEX_FILE} does not say so")


def _file_tensors(file: Path, dtypes: frozenset[str]) -> dict[str, StoredTensor]:
    """The file's own names to tensors. The header is checked against the file's size by the safetensors library."""
    if not os.path.isfile(file):  # Path.is_file raises for a name that no file can have
        raise CheckpointError(f"{file}: the file is missing")
    try:
        opened: Any = safe_open(file, framework="numpy")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged, or no safetensors file: {error}") from None
    for name, view in slices.items():
        if view.get_dtype() not in dtypes:
            raise UnsupportedModelError(
                f"{file}: tensor {name!r} has dtype {view.get_dtype()}; read are {', '.join(sorted(dtypes))}"
            )
    return {
        name: StoredTensor(
            file=file,
            stored_name=name,
            shape=tuple(view.get_shape()),
            read=partial(_read_fp8, file, name) if view.get_dtype() == "F8_E4M3" else partial(opened.get_tensor, name),
        )
        for name, view in slices.items()
    }


def _read_fp8(file: Path, name: str) -> np.ndarray[Any, Any]:
    """A tensor of float8_e4m3fn, which the library cannot give to numpy. Its header was checked when it was opened."""
    with file.open("rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(header_size))[name]
        begin, end = entry["data_offsets"]
        opened.seek(8 + header_size + begin)
        return np.frombuffer(opened.read(end - begin), ml_dtypes.float8_e4m3fn).reshape(entry["shape"])
