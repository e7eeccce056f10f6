"""The Llama forward pass of one whole sequence in float64 numpy: no pages, no batch, no chunks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.config import ModelConfig

HostArray = np.ndarray[Any, Any]


def llama_logits(weights: Mapping[str, HostArray], config: ModelConfig, token_ids: Sequence[int]) -> HostArray:
    """float64[tokens, vocab]. Plain rotary embedding, no biases, no window, an untied head."""
    length, group = len(token_ids), config.num_heads // config.num_kv_heads
    x = weights["embed_tokens.weight"][list(token_ids)].astype(np.float64)
    causal = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
    for i in range(config.num_layers):
        layer = {name: weights[f"layers.{i}.{name}.weight"].astype(np.float64) for name in LAYER_WEIGHTS}
        normed = _norm(x, layer["input_layernorm"], config.rms_norm_eps)
        q = _rotate((normed @ layer["self_attn.q_proj"].T).reshape(length, config.num_heads, -1), config)
        k = _rotate((normed @ layer["self_attn.k_proj"].T).reshape(length, config.num_kv_heads, -1), config)
        v = (normed @ layer["self_attn.v_proj"].T).reshape(length, config.num_kv_heads, -1)
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5 + causal
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(length, -1)
        x = x + attended @ layer["self_attn.o_proj"].T
        normed = _norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
        gate = normed @ layer["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return _norm(x, weights["norm.weight"], config.rms_norm_eps) @ weights["lm_head.weight"].T.astype(np.float64)


LAYER_WEIGHTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def _norm(x: HostArray, weight: HostArray, eps: float) -> HostArray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


def _rotate(x: HostArray, config: ModelConfig) -> HostArray:
    frequencies = config.rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turned = np.exp(1j * np.arange(len(x))[:, None, None] * frequencies)
    half = config.head_dim // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * turned
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
