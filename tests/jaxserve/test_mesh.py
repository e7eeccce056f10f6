"""An engine spread over devices gives one device's tokens, whatever divides and whatever does not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
WIDTHS = (2, 4, 8)
KV_HEADS = (1, 2, 3, 8)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with eight devices saw; this one has a single device."""
    paths = [TESTS.parent, TESTS, TESTS / "models"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "NPROC": "16",  # XLA's threads: with fewer than devices, a collective could wait for a device that has none
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    script = [sys.executable, str(TESTS / "jaxserve/mesh_process.py"), str(tmp_path_factory.mktemp("mesh"))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600, check=False)
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


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["safetensors", "gguf", "orbax"])
def test_each_device_is_given_its_part_of_the_weights_and_nothing_else(
    name: str, width: int, seen: dict[str, Any]
) -> None:
    assert seen["restored"][f"{name}/{width}"] == []
