"""Writes tiny checkpoints in every format and runs the forward pass over one sequence, for the tests beside it."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden.weights import tiny_weights
from quick_compilation import QUICK_OPTIONS
from safetensors.numpy import save_file

from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.registry import module_for
from models.step import KVPool, StepBatch
from pallas_kernels.paged_attention import AttentionRows

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json") if path.parent.name != "sharded")

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

PAGE_SIZE = 16
BLOCK_Q = 32
_LLAMA_CPP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def golden_config(variant: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((GOLDEN / variant / "config.json").read_text())
    return config


def write_hf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """A folder with one safetensors file; without `tensors`, the tiny weights of `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tiny_weights(config) if tensors is None else tensors), folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, config: Mapping[str, Any], shards: Mapping[str, list[str]]) -> Path:
    """A folder with an index; `shards` maps file names to the tensors in them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = tiny_weights(config)
    for file, names in shards.items():
        save_file({name: weights[name] for name in names}, folder / file)
    write_index(folder, {name: file for file, names in shards.items() for name in names})
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def llama_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter says of a Llama; `rope_parameters` of kind linear and yarn included."""
    rope = config.get("rope_parameters") or {}
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
        "llama.rope.freq_base": rope.get("rope_theta", 10000.0),
        "llama.vocab_size": config["vocab_size"],
    }
    eos = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    ends = zip(("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"), eos, strict=False)
    metadata |= dict(ends) | {"tokenizer.ggml.bos_token_id": config["bos_token_id"]}
    if config.get("head_dim"):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            metadata[f"llama.{key}"] = config["head_dim"]
    if rope.get("rope_type") in ("linear", "yarn"):
        metadata |= {"llama.rope.scaling.type": rope["rope_type"], "llama.rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        metadata["llama.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.get("sliding_window"):
        metadata["llama.attention.sliding_window"] = config["sliding_window"]
    return metadata


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter would write it.

    Args:
      tensors: by Hugging Face's names, in its row order; without them, the tiny weights of `config`.
      kind: of the matrices; vectors are F32.
      metadata: instead of `llama_metadata(config)`.
      extra: tensors by llama.cpp's names, written as they are.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (llama_metadata(config) if metadata is None else metadata).items():
        if key != "general.architecture" or value != "llama":  # the writer put that one there itself
            add_metadata(writer, key, value)
    for name, value in (tiny_weights(config) if tensors is None else tensors).items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                value = interleave(value, config[heads])
        if value.ndim == 1:
            writer.add_tensor(llama_cpp_name(name), value)
        else:
            writer.add_tensor(llama_cpp_name(name), gguf.quantize(value, kind), raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def llama_cpp_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_LLAMA_CPP_NAMES[part]}.{kind}"
    return f"{_LLAMA_CPP_NAMES[stem]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's reordering: rows i and i + head_dim / 2 of a head become neighbours."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + side * half + pair for head in range(heads) for pair in range(half) for side in (0, 1)]
    return np.ascontiguousarray(rows[order])


def expected_params(config: ModelConfig, dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters that the model wants, by canonical name."""
    state = nnx.state(module_for(config)(config, dtype))
    return {
        ".".join(str(part) for part in path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in nnx.to_flat_state(state)
    }


def load_all(checkpoint: Checkpoint, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return checkpoint.load(expected_params(checkpoint.config, dtype))


def forward(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    token_ids: np.ndarray,
    positions: np.ndarray,
    *,
    decode: int = 0,
    optimize: bool = False,
) -> np.ndarray:
    """Logits float32[positions, vocab] of one sequence.

    Args:
      decode: so many of the last tokens go through steps of their own, one decode row each; the rest in one prefill.
      optimize: as users' programs are; it takes a large model's time to compile.
    """
    step, head = _jitted(optimize)
    module = module_for(config)(config, jnp.float32)
    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    state = nnx.from_flat_state([(path, leaf.replace(params[".".join(map(str, path))])) for path, leaf in flat])
    num_prompt = len(token_ids) - decode
    num_pages = -(-max(len(token_ids), 192) // BLOCK_Q) * BLOCK_Q // PAGE_SIZE + 1
    kv = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), KVPool.shapes(config, num_pages, PAGE_SIZE, "float32"))
    batch = _prefill(token_ids[:num_prompt], len(token_ids), num_pages)
    hidden, kv = step(graph, state, batch, kv)
    rows = [hidden[:num_prompt]]
    for position in range(num_prompt, len(token_ids)):
        hidden, kv = step(graph, state, _decode(token_ids[position], position, len(token_ids), num_pages), kv)
        rows.append(hidden)
    return np.asarray(head(graph, state, jnp.concatenate(rows)[positions]))


@functools.cache
def _jitted(optimize: bool) -> list[Any]:
    options = None if optimize else QUICK_OPTIONS
    return [jax.jit(function, static_argnums=0, compiler_options=options) for function in (_step, _logits)]


def _step(graph: Any, state: Any, batch: StepBatch, kv: KVPool) -> Any:
    return nnx.merge(graph, state)(batch, kv)


def _logits(graph: Any, state: Any, hidden: jax.Array) -> Any:
    return nnx.merge(graph, state).logits(hidden)


def _rows(starts: list[int], lengths: list[int]) -> AttentionRows:
    zeros = jnp.zeros(len(starts), jnp.int32)
    return AttentionRows(tables=zeros, starts=jnp.array(starts, jnp.int32), lengths=jnp.array(lengths, jnp.int32))


def _batch(token_ids: np.ndarray, positions: np.ndarray, real: np.ndarray, rope_length: int, num_pages: int) -> Any:
    return {
        "token_ids": jnp.asarray(token_ids, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "page_ids": jnp.asarray(np.where(real, positions // PAGE_SIZE + 1, 0), jnp.int32),
        "offsets": jnp.asarray(positions % PAGE_SIZE, jnp.int32),
        "rope_lengths": jnp.full(len(token_ids), rope_length, jnp.int32),
        "block_tables": jnp.arange(1, num_pages, dtype=jnp.int32)[None],
    }


def _prefill(token_ids: np.ndarray, rope_length: int, num_pages: int) -> StepBatch:
    count = len(token_ids)
    padded = (num_pages - 1) * PAGE_SIZE  # one shape for short and long: one compilation a model
    positions = np.arange(padded)
    starts = list(range(0, padded, BLOCK_Q))
    lengths = [min(start + BLOCK_Q, count) if start < count else 0 for start in starts]
    arrays = _batch(np.resize(token_ids, padded), positions, positions < count, rope_length, num_pages)
    return StepBatch(**arrays, decode=_rows([], []), prefill=_rows(starts, lengths))


def _decode(token_id: int, position: int, rope_length: int, num_pages: int) -> StepBatch:
    arrays = _batch(np.array([token_id]), np.array([position]), np.array([True]), rope_length, num_pages)
    return StepBatch(**arrays, decode=_rows([position], [position + 1]), prefill=_rows([], []))
