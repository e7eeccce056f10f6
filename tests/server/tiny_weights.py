"""The tiny random model that the servers under test have, written as a Hugging Face folder; needs numpy alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_tiny_weights(folder: Path, vocab_size: int) -> None:
    hidden, heads, kv_heads, head_dim, mlp = 32, 4, 2, 8, 64
    shapes = {"model.embed_tokens.weight": (vocab_size, hidden), "lm_head.weight": (vocab_size, hidden)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{layer}.mlp.gate_proj.weight": (mlp, hidden),
            f"{layer}.mlp.up_proj.weight": (mlp, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, mlp),
        }
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) * 0.5 for name, shape in shapes.items()}
    for name in (
        "model.norm",
        *(f"model.layers.{i}.{n}_layernorm" for i in (0, 1) for n in ("input", "post_attention")),
    ):
        tensors[f"{name}.weight"] = np.ones(hidden, np.float32)
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
