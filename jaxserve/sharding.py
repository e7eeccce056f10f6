"""From the logical axis names that parameters carry to a device mesh; a mesh of one device for now."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Logical axis -> mesh axis. `embed` stays whole: every matrix is split along its other axis, once.
RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": None,
}


def single_device_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("tensor",))


def parameter_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes)))


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """For [pages, kv_heads, page_size, 2 * head_dim]: each device holds its own heads' pages."""
    return NamedSharding(mesh, PartitionSpec(None, "tensor"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
