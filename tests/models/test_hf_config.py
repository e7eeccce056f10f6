"""`config.json` in both spellings, rope rules, defaults, and values that are refused by their key."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import HF_CONFIG, VARIANTS, golden_config

from models.checkpoint.hf_config import read_hf_config
from models.config import ModelConfig, RopeConfig
from models.errors import CheckpointError, ModelError, UnsupportedModelError


def parse(folder: Path, config: dict[str, Any] | str, *, generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_hf_config(folder, stores_head=True)


def rope_of(folder: Path, rope: dict[str, Any], **changes: Any) -> RopeConfig:
    return parse(folder, HF_CONFIG | {"rope_parameters": rope} | changes).rope


def old_spelling(config: dict[str, Any], type_key: str) -> dict[str, Any]:
    """The same model as transformers 4 wrote it."""
    rope = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": "bfloat16"}
    kind = rope.pop("rope_type")
    return old | {"rope_scaling": None if kind == "default" else rope | {type_key: kind}}


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    return config.attention_bias, config.attention_output_bias, config.mlp_bias


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_old_and_new_spelling_mean_the_same(variant: str, type_key: str, tmp_path: Path) -> None:
    config = golden_config(variant)
    new = parse(tmp_path, config)
    assert parse(tmp_path, old_spelling(config, type_key)) == new
    assert new.rope.kind == config["rope_parameters"]["rope_type"]


def test_llama_defaults(tmp_path: Path) -> None:
    config = {key: value for key, value in HF_CONFIG.items() if key != "num_key_value_heads"}
    parsed = parse(tmp_path, config)
    assert parsed.num_kv_heads == parsed.num_heads == 4
    assert parsed.head_dim == 8
    assert parsed.rope == RopeConfig(theta=10000.0)
    assert parsed.rms_norm_eps == 1e-6
    assert parsed.sliding_window is None
    assert biases(parsed) == (False, False, False)


def test_mistral_defaults(tmp_path: Path) -> None:
    config = HF_CONFIG | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16, "head_dim": 4}
    del config["num_key_value_heads"]
    parsed = parse(tmp_path, config)
    assert parsed.num_kv_heads == 8
    assert parsed.sliding_window == 4096
    assert parse(tmp_path, config | {"num_key_value_heads": None}).num_kv_heads == 16
    assert parse(tmp_path, config | {"sliding_window": None}).sliding_window is None
    assert parse(tmp_path, config | {"sliding_window": 7}).sliding_window == 7


def test_a_llama_has_no_window_and_a_mistral_no_biases_whatever_their_keys_say(tmp_path: Path) -> None:
    keys = {"sliding_window": 7, "attention_bias": True, "mlp_bias": True}
    llama = parse(tmp_path, HF_CONFIG | keys)
    assert llama.sliding_window is None
    assert biases(llama) == (True, True, True)
    mistral = parse(tmp_path, HF_CONFIG | keys | {"architectures": ["MistralForCausalLM"]})
    assert mistral.sliding_window == 7
    assert biases(mistral) == (False, False, False)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (2, 2, (2,)),
        (2, [7, 2, 9], (2, 7, 9)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_the_union_of_both_files(config: Any, generation: Any, expected: Any, tmp_path: Path) -> None:
    parsed = parse(tmp_path, HF_CONFIG | {"eos_token_id": config}, generation={"eos_token_id": generation})
    assert parsed.eos_token_ids == expected


@pytest.mark.parametrize("token_id", [96, -1, "2", 2.0, True, [2, 96]])
def test_end_tokens_outside_the_vocabulary_are_refused(token_id: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is"):
        parse(tmp_path, HF_CONFIG, generation={"eos_token_id": token_id})


# The YaRN paper's 0.1 ln(factor) + 1, unless it is given or both of DeepSeek's weights are.
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.0}, (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarn_attention_factor(given: dict[str, Any], expected: float, tmp_path: Path) -> None:
    rope = rope_of(tmp_path, {"rope_type": "yarn", "factor": 4.0, **given})
    assert rope.attention_factor == pytest.approx(expected, abs=1e-12)
    assert rope.original_max_position == HF_CONFIG["max_position_embeddings"]


@pytest.mark.parametrize(
    ("rope", "declared", "longest"),
    [
        ({"rope_type": "default"}, 128, 128),
        ({"rope_type": "linear", "factor": 4}, 128, 512),
        ({"rope_type": "dynamic", "factor": 2.5}, 128, 320),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}, 300, 300),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
            | {"original_max_position_embeddings": 64},
            128,
            128,
        ),
    ],
)
def test_the_longest_context_counts_the_stretching(
    rope: dict[str, Any], declared: int, longest: int, tmp_path: Path
) -> None:
    config = HF_CONFIG | {"rope_parameters": rope, "max_position_embeddings": declared}
    assert parse(tmp_path, config).max_position == longest


def test_the_outer_original_context_wins_over_the_inner(tmp_path: Path) -> None:
    inner = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    assert rope_of(tmp_path, inner).original_max_position == 32
    assert rope_of(tmp_path, inner, original_max_position_embeddings=64).original_max_position == 64


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": math.nan}, "factor is nan"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; it must be at least 1"),
        ({"rope_type": "linear", "factor": "4"}, "factor is '4'; it must be a number"),
        ({"rope_type": "dynamic", "factor": True}, "factor is True; it must be a number"),
        ({"rope_type": 3}, "rope_type is 3; it must be a string"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0; it must exceed"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5}, "beta_fast is 0.5; it must be at least"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}, "attention_factor is -1.0"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "theta is 1.0; yarn"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate is 1"),
        ([1, 2], "it must be an object"),
    ],
)
def test_rope_values_are_refused_by_key(rope: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_of(tmp_path, rope)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be an integer from 1"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": 96.0}, r"vocab_size is 96\.0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": "big"}, "intermediate_size is 'big'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 6}, "head_dim is None; it is needed"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads, 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8; it must divide"),
        ({"head_dim": 7}, "head_dim is 7; rotary pairs need an even"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": ["a", "b"]}, "architectures is"),
        ({"bos_token_id": 1000}, "bos_token_id is 1000"),
    ],
)
def test_values_are_refused_by_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        parse(tmp_path, HF_CONFIG | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "'Qwen2ForCausalLM'; implemented are LlamaForCausalLM, Mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types mixes"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse(tmp_path, HF_CONFIG | changes)


WEIRD = (None, True, -1, 0, 0.5, 1e308, 10**30, math.nan, math.inf, "", "x", [], [1], [[]], [{}], {}, {"a": {}})
KEYS = sorted(
    {
        *HF_CONFIG,
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "layer_types",
    }
    | {"quantization_config", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    | {"original_max_position_embeddings"}
)
ROPE_KEYS = sorted({"rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "attention_factor", "mscale"})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_weird_values_are_taken_or_refused_but_never_crash(architecture: str, tmp_path: Path) -> None:
    config = HF_CONFIG | {"architectures": [architecture]}
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}
    cases = [config | {key: value} for key in KEYS for value in WEIRD]
    cases += [config | {"rope_parameters": yarn | {key: value}} for key in ROPE_KEYS for value in WEIRD]
    refused = 0
    for case in cases:
        try:
            parse(tmp_path, case)
        except ModelError as error:
            assert "config.json" in str(error)  # noqa: PT017, some of these are sound
            refused += 1
    assert refused > len(cases) // 2


@pytest.mark.parametrize("damaged", ["", "{", "[]", "3", "\udcff".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_damaged_json_is_an_error_that_names_the_file(damaged: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        parse(tmp_path, damaged)
