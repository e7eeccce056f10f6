"""The tiny models' weights, made anew wherever they are needed: the same numbers from a configuration, anywhere."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensor names and shapes of a Llama or Mistral `config.json`."""
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    linears = {
        "self_attn.q_proj": ((heads, hidden), config.get("attention_bias")),
        "self_attn.k_proj": ((kv_heads, hidden), config.get("attention_bias")),
        "self_attn.v_proj": ((kv_heads, hidden), config.get("attention_bias")),
        "self_attn.o_proj": ((hidden, heads), config.get("attention_bias")),
        "mlp.gate_proj": ((inter, hidden), config.get("mlp_bias")),
        "mlp.up_proj": ((inter, hidden), config.get("mlp_bias")),
        "mlp.down_proj": ((hidden, inter), config.get("mlp_bias")),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, (shape, has_bias) in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if has_bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def tiny_weights(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """float32 weights of `tensor_shapes`, by Hugging Face's names.

    The gains make attention peaked: a wrong rotation, mask or head order then moves the logits far more than rounding.
    `RandomState` is numpy's frozen generator: its numbers never change between versions.
    """
    return {name: _tensor(name, shape) for name, shape in tensor_shapes(config).items()}


def token_ids(count: int, vocab_size: int) -> np.ndarray:
    return np.random.RandomState(count).randint(0, vocab_size, count, np.int64).astype(np.int32)


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        return (1.0 + 0.2 * noise).astype(np.float32)
    if name.endswith(".bias"):
        return (0.3 * noise).astype(np.float32)
    if "embed_tokens" in name:
        return noise.astype(np.float32)
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    return (gain / math.sqrt(shape[1]) * noise).astype(np.float32)
