"""Parses a Hugging Face folder's `config.json` and `generation_config.json`; knows both spellings, reads no weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoint.fields import Fields, attention_shape, longest_context
from models.checkpoint.packed import PackedScheme, read_scheme
from models.config import ModelConfig, RopeConfig
from models.errors import CheckpointError, UnsupportedModelError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What an architecture's own configuration class takes for granted when a key is absent.

    Attributes:
      kv_heads: 0 means as many as heads.
      has_biases: `attention_bias` and `mlp_bias` mean something.
      sliding_window: keys seen; None where the architecture has no window at all.
    """

    kv_heads: int
    has_biases: bool
    sliding_window: int | None


_FAMILIES = {
    "LlamaForCausalLM": _Family(kv_heads=0, has_biases=True, sliding_window=None),
    "MistralForCausalLM": _Family(kv_heads=8, has_biases=False, sliding_window=4096),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or CheckpointError. Its texts are such that any encoding takes them."""
    try:
        value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # refuses half a surrogate pair, which JSON can spell
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; a JSON object is expected")
    return value


def read_hf_config(folder: Path, *, stores_head: bool) -> ModelConfig:
    """The configuration, with the head tied or not as the stored tensors decide.

    Args:
      stores_head: an `lm_head.weight` is stored. It wins over a tie flag; without it the flag must be set.
    Raises:
      CheckpointError: a key is missing or has an impossible value.
      UnsupportedModelError: an architecture, activation, rope rule or quantization that is not implemented.
    """
    values = read_json(folder / CONFIG_FILE)
    fields = Fields(source=str(folder / CONFIG_FILE), values=values)
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    _refuse_unimplemented(fields)
    hidden_size = fields.count("hidden_size")
    kv_heads_given = "num_key_value_heads" in values  # a null means as many as heads, whatever the family
    num_heads, num_kv_heads, head_dim = attention_shape(
        fields,
        hidden_size=hidden_size,
        heads_key="num_attention_heads",
        kv_heads_key="num_key_value_heads",
        head_dim_key="head_dim",
        default_kv_heads=0 if kv_heads_given else family.kv_heads,
    )
    tie_flag = fields.flag("tie_word_embeddings", False)
    if not (stores_head or tie_flag):
        raise CheckpointError(
            f"{folder}: tensor lm_head.weight is missing, and tie_word_embeddings in {CONFIG_FILE} is not true"
        )
    vocab_size = fields.count("vocab_size")
    max_position = fields.count("max_position_embeddings")
    rope = _rope_config(fields, max_position)
    attention_bias = family.has_biases and fields.flag("attention_bias", False)
    bos = fields.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=longest_context(rope, max_position),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=family.has_biases and fields.flag("mlp_bias", False),
        tie_embeddings=not stores_head,
        sliding_window=_sliding_window(fields, family),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_eos_token_ids(folder, fields, vocab_size),
    )


def read_quantization(folder: Path) -> PackedScheme | None:
    """How the folder's matrices are quantized; None if they are not. Raises CheckpointError, UnsupportedModelError."""
    values = read_json(folder / CONFIG_FILE).get("quantization_config")
    if values is None:
        return None
    source = f"{folder / CONFIG_FILE}: quantization_config"
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}: it must be an object")
    return read_scheme(Fields(source=source, values=values))


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "it must be a list of one name")
    if names[0] not in _FAMILIES:
        raise UnsupportedModelError(
            f"{fields.source}: architecture {names[0]!r}; implemented are {', '.join(sorted(_FAMILIES))}"
        )
    return names[0]


def _refuse_unimplemented(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{fields.source}: hidden_act {activation!r}; only 'silu' is implemented")
    layer_types = fields.values.get("layer_types") or []
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise fields.error("layer_types", "it must be a list of names")
    if len(set(layer_types)) > 1:
        raise UnsupportedModelError(f"{fields.source}: layer_types mixes {', '.join(sorted(set(layer_types)))}")


def _sliding_window(fields: Fields, family: _Family) -> int | None:
    if family.sliding_window is None:
        return None
    if "sliding_window" in fields.values:  # a null switches it off
        return fields.count("sliding_window") if fields.has("sliding_window") else None
    return family.sliding_window


def _eos_token_ids(folder: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = list(fields.token_ids("eos_token_id", vocab_size))
    path = folder / GENERATION_CONFIG_FILE
    if path.exists():
        ids += Fields(source=str(path), values=read_json(path)).token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))


def _rope_config(fields: Fields, max_position: int) -> RopeConfig:
    """The rotary rule.

    The newer spelling keeps everything in `rope_parameters`; the older has `rope_theta` beside `rope_scaling`, and
    `type` for `rope_type`. What the inner object says wins, as in transformers.
    """
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    inner = fields.values.get(key) or {}
    if not isinstance(inner, dict):
        raise fields.error(key, "it must be an object")
    rope = Fields(source=f"{fields.source}: {key}", values=inner)
    if any(isinstance(value, dict) for value in inner.values()):
        raise UnsupportedModelError(f"{fields.source}: {key} per layer type ({', '.join(inner)}) is not implemented")
    for holder in (fields, rope):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(
                f"{holder.source}: partial_rotary_factor {holder.values['partial_rotary_factor']}"
            )
    theta = rope.number("rope_theta") if rope.has("rope_theta") else fields.number("rope_theta", 10000.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise UnsupportedModelError(f"{rope.source}: rope_type {kind!r} is not implemented")
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", "it must be at least 1")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "dynamic":  # transformers' formula takes max_position_embeddings for the trained context
        return RopeConfig(theta=theta, kind="dynamic", factor=factor, original_max_position=max_position)
    outer = fields if fields.has("original_max_position_embeddings") else rope
    original = outer.count("original_max_position_embeddings", max_position)
    with rope.blamed():
        return _llama3(rope, theta, factor, original) if kind == "llama3" else _yarn(rope, theta, factor, original)


def _llama3(rope: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _yarn(rope: Fields, theta: float, factor: float, original: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """What cos and sin are multiplied by: given, or the YaRN paper's 0.1 ln(s) + 1 (arXiv:2309.00071, eq. 22).

    DeepSeek's `mscale` and `mscale_all_dim` weigh the logarithm, and count only together.
    """
    if rope.has("attention_factor"):
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    weights: Mapping[str, Any] = {key: rope.values.get(key) for key in ("mscale", "mscale_all_dim")}
    if all(weights.values()):  # a zero switches them off, as an absence does
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
