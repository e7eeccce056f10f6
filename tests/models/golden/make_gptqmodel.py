"""Writes quantized/{gptq,awq}: a tiny model as GPTQModel quantizes and stores it, and logits of what it reads back.

    cd tests/models && GPTQMODEL_CPU_WORKERS=2 python -m golden.make_gptqmodel

It needs an environment of its own with `gptqmodel==7.6.0 torch==2.13.0 transformers==5.24.0`. The logits are of
transformers' float32 forward with the matrices that GPTQModel's own layers dequantize.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden.weights import tiny_weights, token_ids
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "quantized"
LENGTH = 24
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # GPTQModel clips AWQ's matrices by 64 outputs
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: dict[str, tuple[dict[str, Any], BACKEND]] = {
    "gptq": ({"method": "gptq", "format": "gptq", "sym": False}, BACKEND.GPTQ_TORCH),
    "awq": ({"method": "awq", "format": "gemm", "sym": False}, BACKEND.AWQ_TORCH),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as wide:
        _write_wide(Path(wide))
        calibration = [
            {"input_ids": token_ids(length, TINY["vocab_size"]).tolist(), "attention_mask": [1] * length}
            for length in range(64, 96)
        ]
        for name, (settings, backend) in SETTINGS.items():
            model = GPTQModel.load(wide, QuantizeConfig(bits=4, group_size=16, **settings))
            model.quantize(calibration, batch_size=1, backend=backend)
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            model.save(str(FOLDER / name))
            _write_logits(wide, FOLDER / name, backend)
            for file in (FOLDER / name).iterdir():
                if file.name not in ("config.json", "model.safetensors", "logits.npz"):
                    file.unlink()


def _write_wide(folder: Path) -> None:
    config = LlamaConfig(**TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: torch.from_numpy(value) for name, value in tiny_weights(config.to_dict()).items()}
    model.load_state_dict(weights, strict=True)
    model.save_pretrained(folder)
    vocabulary = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="t0", eos_token="t2").save_pretrained(folder)


def _write_logits(wide: str, folder: Path, backend: BACKEND) -> None:
    read = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16).model.float()
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager").eval()
    values = model.state_dict()
    for name, tensor in read.state_dict().items():
        if name in values:  # AWQ moves scales between norms and matrices
            values[name] = tensor.float()
    for name, module in read.named_modules():
        if name.endswith("_proj"):
            values[f"{name}.weight"] = _dequantized(module).float().T.contiguous()
    model.load_state_dict(values, strict=True)
    ids = token_ids(LENGTH, TINY["vocab_size"])
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None].long()).logits[0]
    np.savez_compressed(folder / "logits.npz", token_ids=ids, logits=logits.numpy())
    print(folder.name, "logits' deviation", float(logits.std()))


def _dequantized(module: Any) -> torch.Tensor:
    """[in, out], by GPTQModel's own code."""
    if isinstance(module, AwqTorchLinear):
        return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
    weight: torch.Tensor = module.dequantize_weight()
    return weight


if __name__ == "__main__":
    main()
