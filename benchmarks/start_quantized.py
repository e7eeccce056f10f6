"""How long a start with narrow weights takes: from a converted checkpoint, and where a wide one is quantized at load.

    python benchmarks/start_quantized.py [--formats int8,int4] [--repeat 2] [--folder FOLDER] [-- flags of serve]

Takes about three minutes on two quiet cores, most of it for what is not measured: checkpoints are written, and first
starts compile. Measured are second starts, whose programs are stored and whose files the system still holds in memory;
the columns are those of `benchmarks/start.py`. What lies in FOLDER from another run is used again: then it takes a
minute.
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from start import COMMAND, ROOT, Start, measure

from jaxserve.text.tokenizer import load_tokenizer, save_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from models.registry import parameter_structs

MODEL = "smollm2-135m"
PAGES = ["--set", "cache.num_pages=2049"]  # "auto" follows free memory, and programs follow it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int8,int4")
    parser.add_argument("--repeat", type=int, default=2, help="measured starts of each")
    parser.add_argument("--folder", type=Path, help="for checkpoints and programs; default: a temporary one")
    parser.add_argument("flags", nargs="*", help="more flags of `jaxserve serve`, after --")
    parsed = parser.parse_args()
    print("| weights | from | ready | first token | weights read | programs | CPU seconds | peak memory |")
    print("| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |", flush=True)
    place = contextlib.nullcontext(parsed.folder) if parsed.folder else tempfile.TemporaryDirectory()
    with place as name:
        folder = Path(name).resolve()
        env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        if not (folder / "safetensors" / "config.json").exists():
            write_safetensors(folder / "safetensors")
        for format in parsed.formats.split(","):
            target = folder / format
            if not target.exists():
                convert = [*COMMAND, "convert", MODEL, str(target), "--quantize", format]
                subprocess.run(convert, check=True, cwd=ROOT, env=env, capture_output=True)
            at_load = ["--set", f"model.quantization={format}"]
            sources = {
                f"Orbax, quantized, {megabytes(target)} MB": ["--model", str(target)],
                f"GGUF Q4_1, {megabytes(resolve_model(MODEL))} MB": ["--model", MODEL, *at_load],
                f"safetensors, float16, {megabytes(folder / 'safetensors')} MB": [
                    "--model", str(folder / "safetensors"), *at_load,
                ],
            }  # fmt: skip
            for source, flags in sources.items():
                for _ in range(parsed.repeat):
                    print(row(format, second_start(source, [*flags, *PAGES, *parsed.flags], env)), flush=True)


def second_start(name: str, flags: list[str], env: dict[str, str]) -> Start:
    start = measure(name, flags, env)
    return start if " 0 compiled" in start.programs_took else measure(name, flags, env)


def row(format: str, start: Start) -> str:
    return (
        f"| {format} | {start.name} | **{start.ready:.1f} s** | {start.first_token:.1f} s | {start.weights_took} | "
        f"{start.programs_took} | {start.cpu:.1f} | {start.peak_mb:.0f} MB |"
    )


def megabytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) // 10**6


def write_safetensors(folder: Path) -> None:
    """The embedded model as a Hugging Face folder, in float16."""
    path = resolve_model(MODEL)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    params = checkpoint.load(parameter_structs(config, jnp.dtype(jnp.float16)))
    save_tokenizer(load_tokenizer(path), folder)
    save_file({f"model.{name}": np.asarray(array) for name, array in params.items()}, folder / "model.safetensors")
    described = {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    main()
