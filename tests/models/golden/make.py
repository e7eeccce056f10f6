"""Makes the golden files beside it: logits of transformers' float32 eager forward, the reference for `models/`.

    cd tests/models && python -m golden.make [path of SmolLM2-135M-Instruct.Q4_1.gguf]

It needs an environment of its own with `torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate`. Every sequence
goes through one forward call, so `dynamic` RoPE takes its frequencies from the sequence's whole length.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden.weights import tiny_weights, token_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedConfig

FOLDER = Path(__file__).parent
LENGTHS = (24, 160)  # the second is past every tiny model's trained context of 64, and past the sliding window
TOP = 200  # logits kept per position of the real model

TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **values}}


LLAMA_VARIANTS: dict[str, dict[str, Any]] = {
    "llama_gqa_untied": {"num_hidden_layers": 3},
    "llama_mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama_mha": {"num_key_value_heads": 4},
    "llama_head_dim": {"head_dim": 32, "rms_norm_eps": 1e-5},
    "llama_bias": {"attention_bias": True, "mlp_bias": True},
    "llama_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "eos_token_id": [2, 7]},
    "rope_linear": _scaled("linear", factor=4.0),
    "rope_dynamic": {"max_position_embeddings": 64, **_scaled("dynamic", factor=4.0)},
    "rope_llama3": _scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "rope_yarn": _scaled("yarn", factor=4.0, original_max_position_embeddings=64),
    "rope_yarn_mscale": _scaled(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=16.0,
        beta_slow=0.5,
        mscale=0.7,
        mscale_all_dim=1.0,
        truncate=False,
    ),
    "rope_yarn_attention_factor": _scaled(
        "yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.25
    ),
}
MISTRAL_VARIANTS: dict[str, dict[str, Any]] = {
    "mistral_sliding": {"sliding_window": 32},
    "mistral_full": {"sliding_window": None},
}
PROMPTS = {
    "capital": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "squares": " ".join(f"{i} squared is {i * i}." for i in range(140)),
}


def main() -> None:
    for name, changes in LLAMA_VARIANTS.items():
        make_tiny(name, LlamaConfig(**TINY | changes, architectures=["LlamaForCausalLM"]))
    for name, changes in MISTRAL_VARIANTS.items():
        make_tiny(name, MistralConfig(**TINY | changes, architectures=["MistralForCausalLM"]))
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
    make_sharded("sharded", LlamaConfig(**TINY | small, architectures=["LlamaForCausalLM"]))
    if len(sys.argv) > 1:
        make_smollm2(Path(sys.argv[1]))


def make_tiny(name: str, config: PreTrainedConfig) -> None:
    """One folder: `config.json` as transformers writes it, and logits. The weights follow from the configuration."""
    folder = _empty(name)
    config.save_pretrained(folder)
    _save_logits(_tiny_model(config), folder, config.vocab_size)


def make_sharded(name: str, config: PreTrainedConfig) -> None:
    """A whole folder as transformers itself writes it: bfloat16, in shards, with an index."""
    folder = _empty(name)
    _tiny_model(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    _save_logits(model.eval(), folder, config.vocab_size)


def make_smollm2(gguf: Path) -> None:
    """The embedded model through transformers' own GGUF loader, right for a plain Llama without rope scaling."""
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, attn_implementation="eager").eval()
    arrays: dict[str, np.ndarray] = {}
    for name, prompt in PROMPTS.items():
        ids = np.array(tokenizer(prompt, add_special_tokens=False)["input_ids"], np.int32)
        positions, logits = _logits(model, ids)
        top = np.argsort(-logits, axis=-1)[:, :TOP]
        arrays |= {
            f"{name}.token_ids": ids,
            f"{name}.positions": positions,
            f"{name}.top_ids": top.astype(np.int32),
            f"{name}.top_logits": np.take_along_axis(logits, top, axis=-1),
            f"{name}.logsumexp": torch.logsumexp(torch.from_numpy(logits), -1).numpy(),
        }
        print(name, len(ids), tokenizer.decode(top[-1, :1]))
    np.savez_compressed(FOLDER / "smollm2.npz", **arrays)


def _empty(name: str) -> Path:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _tiny_model(config: PreTrainedConfig) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {key: torch.from_numpy(value) for key, value in tiny_weights(config.to_dict()).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set()), missing
    model.tie_weights()
    return model


def _save_logits(model: torch.nn.Module, folder: Path, vocab_size: int) -> None:
    arrays: dict[str, np.ndarray] = {}
    for length in LENGTHS:
        ids = token_ids(length, vocab_size)
        positions, logits = _logits(model, ids)
        arrays |= {f"{length}.token_ids": ids, f"{length}.positions": positions, f"{length}.logits": logits}
    np.savez_compressed(folder / "logits.npz", **arrays)
    print(folder.name, "logits' deviation", arrays[f"{LENGTHS[-1]}.logits"].std())


def _logits(model: torch.nn.Module, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Six positions from the first to the last, and float32[6, vocab]."""
    last = len(ids) - 1
    positions = np.array([0, 1, last // 3, 2 * last // 3, last - 1, last], np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None].long(), use_cache=False).logits[0]
    return positions, logits[torch.from_numpy(positions).long()].float().numpy()


if __name__ == "__main__":
    main()
