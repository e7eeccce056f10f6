"""Logical axes find their place on the mesh."""

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from tiny_engine import TINY_MODEL, TinyOptions, tiny_config

from jaxserve.device.sharding import kv_sharding, parameter_sharding, replicated, tensor_mesh, vocab_sharding
from jaxserve.errors import ConfigError
from jaxserve.startup.loading import program_spec


def one_device() -> Mesh:
    return tensor_mesh(1, jax.devices())


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
    assert parameter_sharding(one_device(), axes).spec == spec


def test_more_devices_than_there_are_is_an_error_that_names_the_knob() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.tensor is 2; here is only 1 device \(cpu\): lower mesh\.tensor"):
        tensor_mesh(2, jax.devices()[:1])


def test_an_unknown_axis_is_an_error() -> None:
    with pytest.raises(KeyError, match="experts"):
        parameter_sharding(one_device(), ("experts",))


def test_pages_are_split_by_kv_head_logits_by_vocabulary_and_metadata_is_everywhere() -> None:
    mesh = one_device()
    assert kv_sharding(mesh).spec == PartitionSpec(None, "tensor")
    assert vocab_sharding(mesh).spec == PartitionSpec(None, "tensor")
    assert replicated(mesh).spec == PartitionSpec()


def test_every_parameter_of_a_model_splits_along_at_most_one_axis() -> None:
    spec = program_spec(tiny_config(TinyOptions()), TINY_MODEL, 100, one_device())
    structs = jax.tree.leaves(spec.params)
    assert len(structs) == len(nnx.to_flat_state(spec.params)) == 2 * 9 + 3
    split = [sum(axis is not None for axis in struct.sharding.spec) for struct in structs]
    assert max(split) == 1
    assert split.count(1) == 2 * 7 + 2  # all matrices; norms stay whole
