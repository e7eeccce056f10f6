"""From the logical axis names that parameters carry to a mesh of devices; knows no model."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError

TENSOR = "tensor"
# Logical axis -> mesh axis. `embed` stays whole: every matrix is split along its other axis, once.
RULES: Mapping[str, str | None] = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
}


def tensor_mesh(tensor: int, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh over the first `tensor` devices. Raises ConfigError where there are fewer."""
    if tensor > len(devices):
        have = f"{len(devices)} device{'s' * (len(devices) != 1)} ({devices[0].device_kind})"
        raise ConfigError(
            f"mesh.tensor is {tensor}; here is only {have}: lower mesh.tensor, or run where there are more"
        )
    return Mesh(np.array(devices[:tensor]), (TENSOR,))


def parameter_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes)))


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """For pages and their scales, [pages, kv_heads, ...]: each device holds its own heads'."""
    return NamedSharding(mesh, PartitionSpec(None, TENSOR))


def vocab_sharding(mesh: Mesh) -> NamedSharding:
    """For [slots, vocab]: each device holds the columns of the logits that it computes."""
    return NamedSharding(mesh, PartitionSpec(None, TENSOR))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def bytes_per_device(structs: Iterable[jax.ShapeDtypeStruct]) -> int:
    """What arrays of these shapes and shardings take on each device."""
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * itemsize_bits(s.dtype) // 8 for s in structs)
