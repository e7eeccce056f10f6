"""Logical axes find their place on the mesh."""

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from tiny_engine import TINY_MODEL, TinyOptions, tiny_config

from jaxserve.loading import program_spec
from jaxserve.sharding import kv_sharding, parameter_sharding, replicated, single_device_mesh


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("vocab", "embed"), PartitionSpec("tensor", None)),
        (("heads", "embed"), PartitionSpec("tensor", None)),
        (("kv_heads", "embed"), PartitionSpec("tensor", None)),
        (("embed", "mlp"), PartitionSpec(None, "tensor")),
        (("embed",), PartitionSpec(None)),
        ((None,), PartitionSpec(None)),
    ],
)
def test_every_axis_but_embed_is_split(axes: tuple[str | None, ...], spec: PartitionSpec) -> None:
    assert parameter_sharding(single_device_mesh(), axes).spec == spec


def test_an_unknown_axis_is_an_error() -> None:
    with pytest.raises(KeyError, match="experts"):
        parameter_sharding(single_device_mesh(), ("experts",))


def test_pages_are_split_by_kv_head_and_metadata_is_everywhere() -> None:
    mesh = single_device_mesh()
    assert kv_sharding(mesh).spec == PartitionSpec(None, "tensor")
    assert replicated(mesh).spec == PartitionSpec()


def test_every_parameter_of_a_model_splits_along_at_most_one_axis() -> None:
    spec = program_spec(tiny_config(TinyOptions()), TINY_MODEL, num_token_ids=100)
    structs = jax.tree.leaves(spec.params)
    assert len(structs) == len(nnx.to_flat_state(spec.params)) == 2 * 9 + 3
    split = [sum(axis is not None for axis in struct.sharding.spec) for struct in structs]
    assert max(split) == 1
    assert split.count(1) == 2 * 7 + 2  # all matrices; norms stay whole
