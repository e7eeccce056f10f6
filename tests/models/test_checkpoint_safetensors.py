"""The Hugging Face reader: what the index names and nothing else, tied heads, and files that lie."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden.weights import tiny_weights
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file
from tiny_models import GOLDEN, HF_CONFIG, expected_params, load_all, write_hf, write_index, write_sharded

from models.checkpoint import open_checkpoint
from models.errors import CheckpointError, ModelError, UnsupportedModelError

TIED = HF_CONFIG | {"tie_word_embeddings": True}
NAMES = sorted(tiny_weights(HF_CONFIG))
SHARDS = {"a.safetensors": NAMES[::2], "b.safetensors": NAMES[1::2]}


def test_one_file_gives_every_weight_back(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, HF_CONFIG))
    params = load_all(checkpoint)
    assert checkpoint.names() == params.keys()
    for name, weight in tiny_weights(HF_CONFIG).items():
        np.testing.assert_array_equal(params[name.removeprefix("model.")], weight)


def test_shards_give_every_weight_back(tmp_path: Path) -> None:
    params = load_all(open_checkpoint(write_sharded(tmp_path, HF_CONFIG, SHARDS)))
    for name, weight in tiny_weights(HF_CONFIG).items():
        np.testing.assert_array_equal(params[name.removeprefix("model.")], weight)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_weights_are_cast_to_the_expected_dtype(stored: Any, wanted: Any, tmp_path: Path) -> None:
    weights = {name: weight.astype(stored) for name, weight in tiny_weights(HF_CONFIG).items()}
    params = load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights)), wanted)
    for name, weight in weights.items():
        param = params[name.removeprefix("model.")]
        assert param.dtype == wanted
        np.testing.assert_array_equal(param, weight.astype(wanted))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_a_weight_too_large_for_the_expected_dtype_is_an_error(stored: Any, tmp_path: Path) -> None:
    weights = {name: weight.astype(stored) for name, weight in tiny_weights(HF_CONFIG).items()}
    weights["model.norm.weight"][3] = 1e6
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': a weight does not fit float16"):
        load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights)), jnp.float16)


def test_weights_are_put_where_the_expected_sharding_says(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, HF_CONFIG))
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")
    expected = {
        name: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
        for name, struct in expected_params(checkpoint.config).items()
    }
    assert {param.sharding for param in checkpoint.load(expected).values()} == {sharding}


def test_weights_outlive_the_file_they_came_from(tmp_path: Path) -> None:
    params = load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG)))
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    for name, weight in tiny_weights(HF_CONFIG).items():
        np.testing.assert_array_equal(params[name.removeprefix("model.")], weight)


@pytest.mark.parametrize(
    ("flag", "stores_head", "tied"), [(True, True, False), (True, False, True), (False, True, False)]
)
def test_a_stored_head_wins_over_the_tie_flag(flag: bool, stores_head: bool, tied: bool, tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG if stores_head else TIED)
    checkpoint = open_checkpoint(write_hf(tmp_path, HF_CONFIG | {"tie_word_embeddings": flag}, weights))
    assert checkpoint.config.tie_embeddings == tied
    params = load_all(checkpoint)
    assert ("lm_head.weight" in params) == stores_head
    if stores_head:
        np.testing.assert_array_equal(params["lm_head.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("flag", [False, None])
def test_no_head_and_no_tie_flag_is_an_error(flag: bool | None, tmp_path: Path) -> None:
    config = {key: value for key, value in (HF_CONFIG | {"tie_word_embeddings": flag}).items() if value is not None}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, and tie_word_embeddings"):
        open_checkpoint(write_hf(tmp_path, config, tiny_weights(TIED)))


def test_rotary_tables_of_early_conversions_are_passed_over(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG)
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    assert len(load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights)))) == len(NAMES)


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG)
    norm = weights.pop("model.layers.1.input_layernorm.weight")
    with pytest.raises(CheckpointError, match=r"tensor layers\.1\.input_layernorm\.weight is missing"):
        load_all(open_checkpoint(write_hf(tmp_path / "missing", HF_CONFIG, weights)))
    weights = tiny_weights(HF_CONFIG) | {"model.layers.0.self_attn.q_norm.weight": norm}
    message = r"model\.safetensors: 'model\.layers\.0\.self_attn\.q_norm\.weight' is stored, but"
    with pytest.raises(CheckpointError, match=message):
        load_all(open_checkpoint(write_hf(tmp_path / "extra", HF_CONFIG, weights)))


def test_a_long_list_of_missing_tensors_is_cut_short(tmp_path: Path) -> None:
    weights = {name: weight for name, weight in tiny_weights(HF_CONFIG).items() if "layers.0" not in name}
    weights["model.layers.0.mlp.up_proj.weight"] = tiny_weights(HF_CONFIG)["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"tensors layers\.0\.input_layernorm\.weight, .* and 3 more are missing"):
        load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights)))


@pytest.mark.parametrize(
    ("name", "shape"), [("model.norm.weight", (48,)), ("model.layers.0.mlp.up_proj.weight", (32, 64))]
)
def test_wrong_shape_is_named_with_both_shapes(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG) | {name: np.ones(shape, np.float32)}
    with pytest.raises(CheckpointError, match=rf"'{name}': shape is \[.*\], the configuration asks for \["):
        load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights)))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (3, "num_hidden_layers is 3, but no tensor of layer 2 is stored"),
        (1, "num_hidden_layers is 1, but tensors of layer 1 are stored"),
        (2**31 - 1, "num_hidden_layers is 2147483647, but no tensor of layer 2 is stored"),
        (10**30, "num_hidden_layers is 1000000000000000000000000000000; it must be"),
    ],
)
def test_layer_count_and_stored_layers_must_agree(layers: int, message: str, tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_hf(tmp_path, HF_CONFIG | {"num_hidden_layers": layers}, weights))


def test_absurd_sizes_fail_at_the_shapes_without_an_allocation(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG)
    checkpoint = open_checkpoint(write_hf(tmp_path, HF_CONFIG | {"vocab_size": 2**31 - 1}, weights))
    expected = expected_params(checkpoint.config)
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match=r"shape is \[96, 32\], the configuration asks for \[2147483647, 32\]"
        ):
            checkpoint.load(expected)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "file_name", ["../x.safetensors", "/etc/x.safetensors", "sub/../../x.safetensors", "..\\x.safetensors", "", 7, None]
)
def test_the_index_cannot_lead_out_of_the_folder(file_name: Any, tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "model", HF_CONFIG, {"a.safetensors": NAMES})
    save_file({"model.norm.weight": np.ones(32, np.float32)}, tmp_path / "x.safetensors")
    write_index(folder, dict.fromkeys(NAMES, "a.safetensors") | {"model.norm.weight": file_name})
    with pytest.raises(
        CheckpointError, match=r"index\.json: tensor 'model\.norm\.weight' is mapped to .* no file inside"
    ):
        open_checkpoint(folder)


def test_shards_may_lie_in_a_subfolder_or_behind_a_link(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "model", HF_CONFIG, SHARDS)
    (folder / "sub").mkdir()
    (folder / "a.safetensors").rename(tmp_path / "blob")
    (folder / "sub" / "a.safetensors").symlink_to(tmp_path / "blob")
    write_index(folder, dict.fromkeys(NAMES[::2], "sub/a.safetensors") | dict.fromkeys(NAMES[1::2], "b.safetensors"))
    assert len(load_all(open_checkpoint(folder))) == len(NAMES)


def test_only_files_that_the_index_names_are_read(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, SHARDS)
    (folder / "stray.safetensors").write_bytes(b"not even a header")
    assert len(load_all(open_checkpoint(folder))) == len(NAMES)


def test_an_index_that_names_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, SHARDS)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: the file is missing"):
        open_checkpoint(folder)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, {"a.safetensors": list(tiny_weights(HF_CONFIG))})
    write_index(folder, {"model.norm.weight": "x" * 5000})
    with pytest.raises(CheckpointError, match="xxx: the file is missing") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 1100, "what a file says of itself is cut in the message"


def test_a_layer_with_a_number_of_thousands_of_digits_is_no_layer(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG)
    weights["model.layers." + "9" * 5000 + ".mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match="has no place for it"):
        load_all(open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights)))


def test_an_index_that_puts_a_tensor_in_the_wrong_shard_is_an_error(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, SHARDS)
    places = {name: file for file, names in SHARDS.items() for name in names}
    write_index(folder, places | {NAMES[0]: "b.safetensors"})
    with pytest.raises(CheckpointError, match=f"'{NAMES[0]}' is stored here, but .* does not say so"):
        open_checkpoint(folder)


def test_an_index_that_names_a_tensor_nobody_stores_is_an_error(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, {"a.safetensors": NAMES})
    write_index(folder, dict.fromkeys([*NAMES, "model.layers.0.self_attn.q_proj.bias"], "a.safetensors"))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, {"a.safetensors": NAMES, "b.safetensors": ["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        open_checkpoint(folder)


def test_a_tensor_under_two_spellings_is_an_error(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG) | {"norm.weight": np.ones(32, np.float32)}
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is also stored in model\.safetensors, as 'model\.norm"):
        open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights))


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_a_damaged_index_is_an_error(index: str, tmp_path: Path) -> None:
    folder = write_sharded(tmp_path, HF_CONFIG, SHARDS)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.bool_])
def test_other_dtypes_are_refused_by_name(dtype: Any, tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG) | {"model.norm.weight": np.ones(32, dtype)}
    with pytest.raises(UnsupportedModelError, match=r"tensor 'model\.norm\.weight' has dtype (I8|I64|BOOL)"):
        open_checkpoint(write_hf(tmp_path, HF_CONFIG, weights))


def test_a_file_cut_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write_hf(tmp_path, HF_CONFIG) / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
            open_checkpoint(tmp_path)


def test_damaged_headers_never_fail_in_another_way(tmp_path: Path) -> None:
    file = write_hf(tmp_path, HF_CONFIG) / "model.safetensors"
    whole = file.read_bytes()
    header_bytes = struct.unpack("<Q", whole[:8])[0] + 8
    random = np.random.RandomState(2)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for place in random.randint(0, header_bytes, random.randint(1, 4)):
            damaged[place] = random.randint(256)
        file.write_bytes(damaged)
        try:
            load_all(open_checkpoint(tmp_path))
        except ModelError:
            refused += 1
    assert refused > 200


def header(**entries: Any) -> bytes:
    encoded = json.dumps(entries).encode()
    return struct.pack("<Q", len(encoded)) + encoded


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**8) + b"{}",
        header(t={"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}) + bytes(4),
        header(t={"dtype": "F32", "shape": [2**20], "data_offsets": [0, 2**22]}) + bytes(4),
        header(t={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}) + bytes(4),
        header(t={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}) + bytes(4),
        header(t={"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
        header(**{name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "tu"}) + bytes(4),
    ],
    ids=["length", "big length", "shape", "offsets", "backwards", "negative", "dtype", "same bytes"],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(data: bytes, tmp_path: Path) -> None:
    (write_hf(tmp_path, HF_CONFIG) / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged"):
        open_checkpoint(tmp_path)


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    (write_hf(tmp_path, HF_CONFIG) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\), which can run code"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    (write_hf(tmp_path, HF_CONFIG) / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_the_folder_that_transformers_wrote_has_three_shards_and_opens() -> None:
    checkpoint = open_checkpoint(GOLDEN / "sharded")
    assert checkpoint.names() == expected_params(checkpoint.config).keys()
    assert checkpoint.config.eos_token_ids == (2,)
