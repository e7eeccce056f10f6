"""Absent devices: names, and what is said where a compiler is missing."""

import importlib.util

import pytest

from jaxserve.aot.topologies import absent_devices, absent_mesh, accelerator
from jaxserve.errors import ConfigError


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def test_an_unknown_topology_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'v99:2x2' is unknown; known kinds are v5e, v6e"):
        absent_devices("v99:2x2")


def test_a_name_says_its_kind() -> None:
    assert accelerator("v5e:2x4").platform == "tpu"
    assert accelerator("h200:8").compute_capability == "9.0"


@pytest.mark.skipif(is_installed("libtpu"), reason="libtpu is installed")
def test_a_missing_tpu_compiler_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"needs libtpu.*pip install 'jax\[tpu\]=="):
        absent_devices("v5e:2x4")


@pytest.mark.skipif(is_installed("jax_cuda12_plugin"), reason="the CUDA plugin is installed")
def test_a_missing_gpu_compiler_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"needs jax's CUDA plugin.*pip install jax-cuda12-plugin=="):
        absent_devices("h200")


@pytest.mark.skipif(not is_installed("libtpu"), reason="needs libtpu: scripts/aot runs this where it is installed")
def test_a_slice_has_its_chips() -> None:
    assert [len(absent_devices(name)) for name in ("v5e:2x4", "v6e", "v5p")] == [8, 4, 4]
    assert absent_mesh("v5e:2x4", {"tensor": 4}).shape == {"tensor": 4}
    with pytest.raises(ConfigError, match="needs 16 devices; v5e:2x4 has 8"):
        absent_mesh("v5e:2x4", {"tensor": 16})
    with pytest.raises(ConfigError, match="refuses the topology 'v5e:3x7'"):
        absent_devices("v5e:3x7")


@pytest.mark.skipif(not is_installed("jax_cuda12_plugin"), reason="needs jax's CUDA plugin, as above")
def test_gpus_are_counted() -> None:
    assert [len(absent_devices(name)) for name in ("h200", "h200:8", "a100", "b200")] == [1, 8, 1, 1]
