"""Our own checkpoints: written, restored into dtype and sharding, refused when damaged."""

import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tiny_models import HF_CONFIG, VARIANTS, expected_params, golden_config, load_all, write_hf

from models.checkpoint import open_checkpoint, save_orbax
from models.config import ModelConfig
from models.errors import CheckpointError, UnsupportedModelError


@pytest.fixture
def source(tmp_path: Path) -> tuple[ModelConfig, dict[str, jax.Array]]:
    checkpoint = open_checkpoint(write_hf(tmp_path / "hf", HF_CONFIG))
    return checkpoint.config, load_all(checkpoint)


@pytest.fixture
def saved(source: tuple[ModelConfig, dict[str, jax.Array]], tmp_path: Path) -> Path:
    save_orbax(tmp_path / "orbax", *source)
    return tmp_path / "orbax"


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "jaxserve.json"
    described = json.loads(path.read_text())
    described["config"] |= changes
    path.write_text(json.dumps(described))
    return folder


def test_parameters_come_back_as_they_were(source: tuple[ModelConfig, dict[str, jax.Array]], saved: Path) -> None:
    config, params = source
    checkpoint = open_checkpoint(saved)
    assert checkpoint.config == config
    assert checkpoint.names() == params.keys()
    restored = load_all(checkpoint)
    for name, param in params.items():
        np.testing.assert_array_equal(restored[name], param)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_configuration_survives_the_json(variant: str, tmp_path: Path) -> None:
    source = open_checkpoint(write_hf(tmp_path / "hf", golden_config(variant)))
    save_orbax(tmp_path / "orbax", source.config, load_all(source))
    assert open_checkpoint(tmp_path / "orbax").config == source.config


def test_divisors_and_end_tokens_come_back_as_tuples(saved: Path) -> None:
    rope = {"theta": 10000.0, "kind": "default", "frequency_divisors": [1.0, 2.0, 4.0, 8.0]}
    config = open_checkpoint(change_config(saved, rope=rope, eos_token_ids=[2, 5])).config
    assert config.rope.frequency_divisors == (1.0, 2.0, 4.0, 8.0)
    assert config.eos_token_ids == (2, 5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_are_restored_in_the_expected_dtype(
    dtype: Any, source: tuple[ModelConfig, dict[str, jax.Array]], saved: Path
) -> None:
    restored = load_all(open_checkpoint(saved), dtype)
    for name, param in source[1].items():
        np.testing.assert_array_equal(restored[name], param.astype(dtype))


def test_parameters_are_restored_where_the_expected_sharding_says(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    expected = {
        name: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
        for name, struct in expected_params(checkpoint.config).items()
    }
    assert {param.sharding for param in checkpoint.load(expected).values()} == {sharding}


def test_without_a_sharding_parameters_go_to_the_default_device(saved: Path) -> None:
    assert {param.sharding for param in load_all(open_checkpoint(saved)).values()} == {
        SingleDeviceSharding(jax.devices()[0])
    }


def test_a_checkpoint_is_never_written_over(source: tuple[ModelConfig, dict[str, jax.Array]], saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds jaxserve\.json already"):
        save_orbax(saved, *source)


def test_missing_extra_and_misshapen_parameters_are_named(
    source: tuple[ModelConfig, dict[str, jax.Array]], tmp_path: Path
) -> None:
    config, params = source
    norm = params["norm.weight"]
    cases = {
        "missing": ({k: v for k, v in params.items() if k != "norm.weight"}, r"tensor norm\.weight is missing"),
        "extra": (
            params | {"layers.0.self_attn.q_norm.weight": norm},
            r"'layers\.0\.self_attn\.q_norm\.weight' is stor",
        ),
        "shape": (params | {"norm.weight": jnp.ones(48)}, r"'norm\.weight': shape is \[48\], .* asks for \[32\]"),
    }
    for case, (stored, message) in cases.items():
        save_orbax(tmp_path / case, config, stored)
        with pytest.raises(CheckpointError, match=message):
            load_all(open_checkpoint(tmp_path / case))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers is 3, but no tensor of layer 2"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": "2"}, r"config\.num_layers: Input should be a valid integer"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide"),
        ({"vocab_size": None}, r"config\.vocab_size"),
        ({"rope": {"theta": -1.0}}, r"theta is -1\.0"),
        ({"rope": {"kind": "longrope"}}, r"config\.rope\.kind"),
        ({"rope": {"kind": "yarn"}}, "original_max_position is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"eos_token_ids": [96]}, "token id 96"),
        ({"rope": {"frequency_divisors": [1.0]}}, "frequency_divisors has 1 values"),
        ({"tie_embeddings": True}, r"tie_embeddings is true, but the checkpoint has lm_head\.weight"),
    ],
)
def test_wrong_values_are_refused_by_key(changes: dict[str, Any], message: str, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(change_config(saved, **changes))


def test_another_format_version_is_refused(saved: Path) -> None:
    path = saved / "jaxserve.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    with pytest.raises(UnsupportedModelError, match="version 2"):
        open_checkpoint(saved)


def test_a_missing_parameter_folder_is_an_error(saved: Path) -> None:
    shutil.rmtree(saved / "params")
    with pytest.raises(CheckpointError, match="params: the folder is missing"):
        open_checkpoint(saved)


def test_a_file_of_orbax_that_nests_without_end_is_refused_before_the_library_dies_of_it(saved: Path) -> None:
    file = saved / "params" / "_sharding"
    [*_, last] = json.loads(file.read_bytes())
    deep = json.dumps({last: "deep"}).replace('"deep"', "[" * 100_000 + "]" * 100_000)
    file.write_text(deep)
    with pytest.raises(CheckpointError, match="_sharding: cannot be read as JSON: maximum recursion"):
        open_checkpoint(saved)


def test_a_lost_or_cut_file_is_an_error_that_names_the_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files only help Orbax to be fast; losing one of those may go unnoticed if every weight comes back whole."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # Orbax abandons its other reads when one fails
    params = load_all(open_checkpoint(saved))
    noticed = 0
    for file in sorted(path for path in (saved / "params").rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for damaged in (None, whole[: len(whole) // 2]):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            try:
                restored = load_all(open_checkpoint(saved))
            except CheckpointError as error:
                assert "orbax/params" in str(error)  # noqa: PT017, either outcome is right
                noticed += 1
            else:
                assert all(np.array_equal(restored[name], param) for name, param in params.items())
            file.write_bytes(whole)
    gc.collect()  # the abandoned reads, while nobody listens
    assert noticed >= 4
