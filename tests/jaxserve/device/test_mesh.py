"""An engine spread over devices gives one device's tokens, whatever divides and whatever does not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick_compilation import XLA_FLAGS

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
WIDTHS = (2, 4, 8)
KV_HEADS = (1, 3, 8)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with eight devices saw; this one has a single device."""
    paths = [TESTS.parent, TESTS, TESTS / "models"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {XLA_FLAGS}",
        "NPROC": "16",  # XLA's threads: with fewer than devices, a collective could wait for a device that has none
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    script = [sys.executable, str(TESTS / "jaxserve/mesh_process.py"), str(tmp_path_factory.mktemp("mesh"))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_a_mesh_gives_one_devices_tokens(kv_heads: int, width: int, seen: dict[str, Any]) -> None:
    alone, spread = (seen["tokens"][f"{kv_heads}/{w}"] for w in (1, width))
    assert [len(tokens) for tokens in spread] == [10] * 6
    assert spread == alone
    of_alone, of_spread = (seen["logprobs"][f"{kv_heads}/{w}"] for w in (1, width))
    assert (
        len(of_alone[1]) == 9 * 3 + 10 * 4
    )  # two of the likeliest beside each prompt token, three beside the output's
    for a, b in zip(of_spread, of_alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "int4"])
def test_narrow_weights_and_pages_are_split_with_their_scales(format: str, width: int, seen: dict[str, Any]) -> None:
    (alone, of_alone), (spread, of_spread) = (seen["narrow"][f"{format}/{w}"] for w in (1, width))
    assert [len(tokens) for tokens in alone] == [10] * 6
    assert spread == alone
    for a, b, of_float in zip(of_spread, of_alone, seen["logprobs"]["3/1"], strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)  # a code may fall on the other side of its middle
        assert not b or b != of_float, "neither weights nor pages can have been of this format"


def test_pages_of_a_mesh_go_to_host_memory_and_come_back(seen: dict[str, Any]) -> None:
    assert seen["host_tier"] == [seen["tokens"]["3/1"]] * 2
    assert seen["restored_pages"] > 0


def test_a_simulated_kernel_runs_on_each_devices_heads(seen: dict[str, Any]) -> None:
    assert seen["simulated"] == [tokens[:3] for tokens in seen["tokens"]["3/1"][:2]]


def test_devices_multiply_with_their_own_part_of_a_4_bit_matrix(seen: dict[str, Any]) -> None:
    assert seen["products"]["outputs"] == 0
    assert seen["products"]["inputs"] < 2.0**-7  # two sums are rounded to bfloat16, where it was one


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["safetensors", "gguf", "orbax"])
def test_each_device_is_given_its_part_of_the_weights_and_nothing_else(
    name: str, width: int, seen: dict[str, Any]
) -> None:
    assert seen["restored"][f"{name}/{width}"] == []


def test_a_layer_costs_two_all_reduces_and_neither_weights_nor_pages_travel(seen: dict[str, Any]) -> None:
    tokens_of_steps = (4, 4 + 2 * 8)
    for tokens, found in zip(tokens_of_steps, seen["collectives"], strict=True):
        states = (f"f32[{tokens},32]", f"f32[32,{tokens}]")  # the CPU's matmuls put tokens last
        wide = [(kind, count) for kind, result, _, count in found if result in states]
        assert {kind for kind, _ in wide} == {"all-reduce"}
        assert sum(count for _, count in wide) == 1 + 2  # the embedding; the attention's output and the MLP's
        others = [size for _, result, size, _ in found if result not in states]
        assert max(others) <= 8 * 160 * 4, found  # rows of logits, where log-probabilities are asked for
