"""Writes and reads our own checkpoints: Orbax parameters with the configuration as JSON beside; knows no tokenizer."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from pydantic import TypeAdapter, ValidationError

from models.checkpoint.base import check_expected, check_layers, narrowed, widened
from models.checkpoint.hf_config import read_json
from models.config import ModelConfig
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.partition import Spread

CONFIG_FILE = "jaxserve.json"
PARAMS_FOLDER = "params"
SHARDINGS_FILE = "_sharding"  # Orbax's, in that folder
FORMAT_VERSION = 1

_CONFIG = TypeAdapter(ModelConfig)
_T = TypeVar("_T")


def save_orbax(folder: Path, config: ModelConfig, params: Mapping[str, jax.Array]) -> None:
    """Writes parameters by canonical name, then the configuration, whose presence marks a finished checkpoint.

    Args:
      folder: made if it is not there; must not hold a checkpoint yet.
    Raises:
      CheckpointError: the folder holds a checkpoint already.
    """
    folder = folder.resolve()  # orbax takes absolute paths only
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS_FOLDER, dict(params))
    described = {"format": "jaxserve", "version": FORMAT_VERSION, "config": asdict(config)}
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n")


def check_free(folder: Path) -> None:
    """Raises CheckpointError if the folder holds a checkpoint already."""
    for name in (CONFIG_FILE, PARAMS_FOLDER):
        if (folder / name).exists():
            raise CheckpointError(f"{folder}: holds {name} already; choose another folder or remove it")


class OrbaxCheckpoint:
    """A folder that `save_orbax` wrote."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError or UnsupportedModelError; reads JSON and Orbax's metadata only."""
        self.path = folder.resolve()
        self.config = _read_config(self.path / CONFIG_FILE)
        self._shapes = self._guarded(self._read_shapes)
        check_layers(self.path, self._shapes, self.config.num_layers, "num_layers")
        if self.config.tie_embeddings == ("lm_head.weight" in self._shapes):
            has = "has" if self.config.tie_embeddings else "lacks"
            flag = str(self.config.tie_embeddings).lower()
            raise CheckpointError(f"{self.path}: tie_embeddings is {flag}, but the checkpoint {has} lm_head.weight")

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def load(
        self, expected: Mapping[str, jax.ShapeDtypeStruct], spreads: Mapping[str, Spread] | None = None
    ) -> dict[str, jax.Array]:
        """Restores every parameter straight into its dtype and sharding, each device reading only its part.

        What is spread is read in even parts of its stored form, and rearranged between the devices.
        """
        spreads = spreads or {}
        stored = expected if self.config.quantization is not None else widened(expected)
        check_expected(self.path, self._shapes, stored, spreads, lambda name: f"{self._params}: {name!r}")
        default = jax.device_put(np.zeros((), np.int8)).sharding
        target = {
            name: _stored_form(struct, spreads[name])
            if name in spreads
            else jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=struct.sharding or default)
            for name, struct in stored.items()
        }
        if len(stored) == len(expected):
            restored = self._guarded(lambda: self._restore(target))
            return {name: self._spread(name, array, stored, spreads) for name, array in restored.items()}
        loaded: dict[str, jax.Array] = {}
        for name in target:  # one by one: the wide model may not fit where the narrow one does
            array = self._guarded(partial(self._restore, {name: target[name]}))[name]
            loaded |= narrowed(name, self._spread(name, array, stored, spreads), expected)
        return loaded

    def _spread(
        self,
        name: str,
        array: jax.Array,
        stored: Mapping[str, jax.ShapeDtypeStruct],
        spreads: Mapping[str, Spread],
    ) -> jax.Array:
        if name not in spreads:
            return array
        return _spreader(spreads[name].axis, stored[name].sharding)(array, jnp.asarray(spreads[name].sources))

    @property
    def _params(self) -> Path:
        return self.path / PARAMS_FOLDER

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        if not self._params.is_dir():
            raise CheckpointError(f"{self._params}: the folder is missing")
        shardings = self._params / SHARDINGS_FILE
        if shardings.exists():
            read_json(shardings)  # tensorstore would overflow its stack on deep nesting, and end the process
        with ocp.StandardCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(self._params).item_metadata
        if metadata is None:
            raise CheckpointError(f"{self._params}: Orbax finds no description of its arrays")
        return {name: tuple(array.shape) for name, array in metadata.items()}

    def _restore(self, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Reads those of the stored arrays that `target` names."""
        restore = ocp.args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored: dict[str, jax.Array] = checkpointer.restore(self._params, args=restore)
        return jax.block_until_ready(restored)

    def _guarded(self, read: Callable[[], _T]) -> _T:
        """Orbax reports a damaged file as anything from KeyError to a bare Exception, with pages of details."""
        try:
            return read()
        except ModelError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{self._params}: damaged: {type(error).__name__}: {reason}") from error


def _stored_form(struct: jax.ShapeDtypeStruct, spread: Spread) -> jax.ShapeDtypeStruct:
    """A parameter as it is stored, in parts of one size; whole on every device if no axis has any (a short vector)."""
    shape = spread.stored_shape(struct.shape)
    assert isinstance(struct.sharding, NamedSharding)
    mesh = struct.sharding.mesh
    parts: list[tuple[str, ...] | None] = [None] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: axis == spread.axis):  # the spread axis last
        if shape[axis] % mesh.size == 0:
            parts[axis] = mesh.axis_names
            break
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=NamedSharding(mesh, PartitionSpec(*parts)))


@functools.cache
def _spreader(axis: int, sharding: Sharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`Spread.apply` on the devices."""

    def apply(stored: jax.Array, sources: jax.Array) -> jax.Array:
        is_real = (sources >= 0).reshape([-1 if i == axis else 1 for i in range(stored.ndim)])
        return jnp.where(is_real, stored.take(jnp.maximum(sources, 0), axis), 0)

    return jax.jit(apply, out_shardings=sharding)


def _read_config(path: Path) -> ModelConfig:
    described = read_json(path)
    if described.get("format") != "jaxserve" or described.get("version") != FORMAT_VERSION:
        raise UnsupportedModelError(
            f"{path}: format {described.get('format')!r}, version {described.get('version')!r}; "
            f"read is format 'jaxserve', version {FORMAT_VERSION}"
        )
    try:
        return _CONFIG.validate_json(json.dumps(described.get("config")), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("config", *first["loc"]))
        raise CheckpointError(f"{path}: {key}: {first['msg']}") from None
