"""Writes quantized/compressed_{int4,fp8}: tiny models as compressed-tensors packs them, and logits.

    cd tests/models && python -m golden.make_compressed

It needs an environment of its own with `compressed-tensors==0.20.1 torch==2.13.0 transformers==5.24.0`. The logits are
of transformers' float32 forward after it read the packed file and widened it, by compressed-tensors' own code.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from golden.weights import tiny_weights, token_ids
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.quantization_config import CompressedTensorsConfig

FOLDER = Path(__file__).parent / "quantized"
LENGTH = 24
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed_int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "compressed_fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
}


def main() -> None:
    for name, (layout, weights) in WEIGHTS.items():
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        _write(FOLDER / name, layout, weights)


def _write(folder: Path, layout: str, weights: dict[str, Any]) -> None:
    config = LlamaConfig(**TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    values = {name: torch.from_numpy(value) for name, value in tiny_weights(config.to_dict()).items()}
    model.load_state_dict(values, strict=True)
    quantization = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        format=layout,
        ignore=["lm_head"],
        quantization_status="frozen",
    )
    apply_quantization_config(model, quantization)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            args = module.quantization_scheme.weights
            groups = module.weight.reshape(module.weight.shape[0], -1, args.group_size or module.weight.shape[1])
            scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            module.weight_scale.data.copy_(scales)
            if not args.symmetric:
                module.weight_zero_point.data.copy_(zeros)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=layout)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    packed = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    ids = token_ids(LENGTH, config.vocab_size)
    with torch.no_grad():
        logits = packed(torch.from_numpy(ids)[None].long()).logits[0]
    np.savez_compressed(folder / "logits.npz", token_ids=ids, logits=logits.float().numpy())


if __name__ == "__main__":
    main()
