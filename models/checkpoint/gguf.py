"""Reads GGUF files of the `llama` architecture: knows llama.cpp's keys, names and row order, not the container."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, dequantize

from models.checkpoint.base import StoredTensor, check_layers, load_tensors
from models.checkpoint.fields import Fields, attention_shape, longest_context
from models.checkpoint.gguf_file import GGUFFile, GGUFTensor, read_gguf
from models.config import ModelConfig, RopeConfig
from models.errors import CheckpointError, UnsupportedModelError
from models.partition import Spread

_ROPE_FREQS = "rope_freqs.weight"
_SCALING = "llama.rope.scaling"
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,8})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Types that numpy can cast by itself; all others are blocks for gguf.dequantize.
_PLAIN: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: ml_dtypes.bfloat16,
}


class GGUFCheckpoint:
    """One GGUF file. `metadata` also holds the tokenizer, for whoever builds that."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError or UnsupportedModelError; reads the header only, and `rope_freqs`."""
        file = read_gguf(path)
        by_name = {canonical_name(name): tensor for name, tensor in file.tensors.items() if name != _ROPE_FREQS}
        self.path = path
        self.metadata: Mapping[str, Any] = file.metadata
        self.config = _model_config(file, by_name)
        check_layers(path, by_name, self.config.num_layers, "llama.block_count")
        self._tensors = {name: _stored(file, self.config, name, tensor) for name, tensor in by_name.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def load(
        self, expected: Mapping[str, jax.ShapeDtypeStruct], spreads: Mapping[str, Spread] | None = None
    ) -> dict[str, jax.Array]:
        return load_tensors(self.path, self._tensors, expected, spreads)


def canonical_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `layers.3.self_attn.q_proj.weight`; a name foreign to the family stays as it is."""
    match = _NAME.fullmatch(name)
    if not match:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else name
    return f"layers.{layer}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else name


def _stored(file: GGUFFile, config: ModelConfig, name: str, tensor: GGUFTensor) -> StoredTensor:
    # llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart; its converter reorders q and k.
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0
    if heads and tensor.shape[0] != heads * config.head_dim:
        raise CheckpointError(
            f"{file.path}: {tensor.name!r} has {tensor.shape[0]} rows; "
            f"{heads} heads of width {config.head_dim} need {heads * config.head_dim}"
        )
    return StoredTensor(
        file=file.path, stored_name=tensor.name, shape=tensor.shape, read=partial(_read, file, tensor, heads)
    )


def _read(file: GGUFFile, tensor: GGUFTensor, interleaved_heads: int) -> np.ndarray[Any, Any]:
    """The tensor in the half-split row order, float32 or the file's own 16-bit type; a copy, never a view of the file.

    Args:
      interleaved_heads: heads whose rows lie in llama.cpp's order; 0 leaves the order alone.
    """
    coded = file.data(tensor)
    plain = _PLAIN.get(tensor.type)
    values = coded.view(plain).copy() if plain else dequantize(coded, tensor.type)
    values = values.reshape(tensor.shape)
    return deinterleave(values, interleaved_heads) if interleaved_heads else values


def deinterleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorders each head's rows from rotary pairs side by side to pairs half a head apart.

    >>> deinterleave(np.array([0, 2, 1, 3]), heads=1)  # rows (0, 2) and (1, 3) are rotated together
    array([0, 1, 2, 3])

    Args:
      rows: [heads * head_dim, ...].
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _model_config(file: GGUFFile, names: Iterable[str]) -> ModelConfig:
    fields = Fields(source=str(file.path), values=file.metadata)
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {architecture!r}; only 'llama' is implemented")
    if file.metadata.get("llama.expert_count"):
        raise UnsupportedModelError(f"{file.path}: mixture of experts (llama.expert_count) is not implemented")
    if isinstance(file.metadata.get("llama.attention.head_count_kv"), list):
        raise UnsupportedModelError(
            f"{file.path}: a head count per layer (llama.attention.head_count_kv) is not implemented"
        )
    hidden_size = fields.count("llama.embedding_length")
    num_heads, num_kv_heads, head_dim = attention_shape(
        fields,
        hidden_size=hidden_size,
        heads_key="llama.attention.head_count",
        kv_heads_key="llama.attention.head_count_kv",
        head_dim_key="llama.attention.key_length",
    )
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if fields.count(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{file.path}: {key} {file.metadata[key]} differs from the head width {head_dim}"
            )
    vocab_size = _vocab_size(fields, file)
    max_position = fields.count("llama.context_length")
    rope = _rope_config(fields, file, head_dim, max_position)
    suffixes = {name.split(".", 2)[-1] for name in names if name.startswith("layers.")}
    bos = fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    eos = {token_id: None for key in _EOS_KEYS for token_id in fields.token_ids(key, vocab_size)}
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.count("llama.feed_forward_length"),
        num_layers=fields.count("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=longest_context(rope, max_position),
        rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=rope,
        attention_bias=bool(suffixes & {f"self_attn.{part}_proj.bias" for part in "qkv"}),
        attention_output_bias="self_attn.o_proj.bias" in suffixes,
        mlp_bias=bool(suffixes & {f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}),
        tie_embeddings="lm_head.weight" not in names,
        sliding_window=_sliding_window(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(eos),
    )


def _vocab_size(fields: Fields, file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    vocab_size = fields.count("llama.vocab_size", embedding.shape[0])
    if vocab_size != embedding.shape[0]:
        raise fields.error("llama.vocab_size", f"'token_embd.weight' has {embedding.shape[0]} rows")
    return vocab_size


def _sliding_window(fields: Fields) -> int | None:
    key = "llama.attention.sliding_window"
    return fields.count(key) if fields.values.get(key) else None


def _rope_config(fields: Fields, file: GGUFFile, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary rule as llama.cpp reads it: a factor without a type is linear; older files say `scale_linear`."""
    kind = fields.text(f"{_SCALING}.type", "linear")
    theta = fields.number("llama.rope.freq_base", 10000.0)
    divisors = _frequency_divisors(file, head_dim)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"{file.path}: {_SCALING}.type {kind!r} is not implemented")
    for key, only in ((f"{_SCALING}.yarn_ext_factor", 1.0), (f"{_SCALING}.yarn_log_multiplier", 0.0)):
        if fields.values.get(key, only) != only:
            raise UnsupportedModelError(f"{file.path}: {key} {fields.values[key]} is not implemented")
    factor = fields.number(f"{_SCALING}.factor", fields.number("llama.rope.scale_linear", 1.0))
    if factor < 1:
        raise fields.error(f"{_SCALING}.factor", "it must be at least 1")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, frequency_divisors=divisors)
    with fields.blamed():
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=fields.count(f"{_SCALING}.original_context_length", max_position),
            beta_fast=fields.number(f"{_SCALING}.yarn_beta_fast", 32.0),
            beta_slow=fields.number(f"{_SCALING}.yarn_beta_slow", 1.0),
            # llama.cpp multiplies the paper's factor, which Hugging Face's `attention_factor` replaces, by this one
            attention_factor=fields.number(f"{_SCALING}.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0),
            frequency_divisors=divisors,
        )


def _frequency_divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """`rope_freqs.weight`, by which converters bake Llama 3's scaling into the file."""
    tensor = file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: {_ROPE_FREQS!r} has shape {list(tensor.shape)}; a head has {head_dim // 2} rotary pairs"
        )
    divisors = _read(file, tensor, 0).astype(np.float32)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise CheckpointError(f"{file.path}: {_ROPE_FREQS!r} holds values that are not positive, finite numbers")
    return tuple(divisors.tolist())
