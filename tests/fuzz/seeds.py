"""The small, sound model files that the file fuzzing starts from, in every format; their contents stay in memory."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.device.sharding import tensor_mesh
from jaxserve.startup.loading import load_params, split_parameters
from jaxserve.text.gguf_tokenizer import build_gguf_tokenizer
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from models.checkpoint import open_checkpoint, save_orbax

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 8, 2, 1, 4, 16
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ bos_token }}"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TYPES = {bool: 7, int: 4, float: 6, str: 8}  # GGUF's numbers for what a Python value is written as


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A model: its files by relative path, and which of them `open_checkpoint` is given ("" for the folder)."""

    name: str
    files: dict[str, bytes] = field(repr=False)
    opened: str = ""

    def with_files(self, files: dict[str, bytes | None]) -> "Sample":
        """With these in place of its own; None takes one away."""
        kept = {name: content for name, content in (self.files | files).items() if content is not None}
        return replace(self, files=kept)

    def write(self, folder: Path) -> Path:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder / self.opened


def samples(folder: Path) -> tuple[Sample, ...]:
    """All of them, each loaded once to show that it is sound. `folder` is scratch space."""
    byte_level, sentencepiece = gguf_header("gpt2"), gguf_header("llama")
    made = [
        Sample(name="gguf", files={"model.gguf": gguf_bytes(byte_level)}, opened="model.gguf"),
        Sample(name="gguf sentencepiece", files={"model.gguf": gguf_bytes(sentencepiece)}, opened="model.gguf"),
    ]
    metadata = dict(byte_level["metadata"])
    tokenizer = Tokenizer(build_gguf_tokenizer(folder, metadata))
    for kind in ("one file", "sharded"):
        hf = folder / kind
        save_tokenizer(tokenizer, hf)
        (hf / "config.json").write_text(json.dumps(hf_config(len(metadata["tokenizer.ggml.tokens"]))))
        (hf / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
        tensors = hf_tensors(len(metadata["tokenizer.ggml.tokens"]))
        if kind == "one file":
            save_file(tensors, hf / "model.safetensors")
        else:
            names = sorted(tensors)
            shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            for file, stored in shards.items():
                save_file({name: tensors[name] for name in stored}, hf / file)
            weight_map = {name: file for file, stored in shards.items() for name in stored}
            (hf / "chat_template.jinja").unlink()
            told = {
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "extra_special_tokens": {"image_token": "<tool>"},
                "added_tokens_decoder": {"0": {"content": "<s>", "special": True}, "2": "<tool>"},
                "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": TEMPLATE}],
            }
            (hf / "tokenizer_config.json").write_text(json.dumps(told))
            (hf / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        made.append(_read(f"safetensors, {kind}", hf))
    checkpoint = open_checkpoint(folder / "one file")
    params = load_whole(folder / "one file")
    save_orbax(folder / "orbax", checkpoint.config, params)
    save_tokenizer(tokenizer, folder / "orbax")
    made.append(_read("orbax", folder / "orbax"))
    for number, sample in enumerate(made):
        path = sample.write(folder / str(number))
        load_whole(path)
        assert load_tokenizer(path).encode("the cat"), sample.name
    return tuple(made)


def load_whole(path: Path) -> dict[str, jax.Array]:
    """Opens a checkpoint and reads every parameter that a model of its configuration has."""
    checkpoint = open_checkpoint(path)
    mesh = tensor_mesh(1, jax.devices())
    _, structs = split_parameters(checkpoint.config, np.dtype(np.float32), mesh)
    loaded = load_params(checkpoint, structs, mesh)
    return {".".join(map(str, at)): leaf.get_value() for at, leaf in nnx.to_flat_state(loaded)}


def _read(name: str, folder: Path) -> Sample:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    return Sample(name=name, files=files)


def hf_config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": [1],
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }


def hf_tensors(vocab_size: int) -> dict[str, np.ndarray]:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "lm_head.weight": (vocab_size, HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (MLP, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, MLP),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}


def gguf_header(tokenizer: str) -> dict[str, Any]:
    """A GGUF file as data: `metadata`, and `tensors` as [name, dims (innermost first), type, offset]."""
    space = "Ġ" if tokenizer == "gpt2" else "▁"
    tokens = ["<s>", "</s>", "<tool>", *LETTERS, space, "th", "the", f"{space}c"]
    kinds = [3, 3, 4] + [1] * (len(tokens) - 3)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "tokenizer.ggml.model": tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }
    if tokenizer == "gpt2":
        metadata |= {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["t h", "th e", f"{space} c"]}
    else:
        metadata["tokenizer.ggml.scores"] = [float(-number) for number in range(len(tokens))]
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (MLP, HIDDEN),
        "blk.0.ffn_up.weight": (MLP, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MLP),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
    }
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append([name, list(reversed(shape)), 0, offset])
        offset += -(-prod(shape) * 4 // 32) * 32
    return {"version": 3, "metadata": metadata, "tensors": tensors, "data_bytes": offset}


def gguf_bytes(described: Mapping[str, Any]) -> bytes:
    """The file that `gguf_header` describes, unchecked: a spoiled description gives a spoiled file.

    Raises:
      ValueError, TypeError, LookupError, AttributeError, OverflowError, struct.error: what no GGUF file can say.
    """
    metadata, tensors = described["metadata"], described["tensors"]
    header = b"GGUF" + struct.pack("<IQQ", described["version"] % 2**32, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _text(key)
        if isinstance(value, list):
            kind = _TYPES[type(value[0])] if value else 4
            header += struct.pack("<IIQ", 9, kind, len(value)) + b"".join(_scalar(kind, item) for item in value)
        else:
            kind = 10 if type(value) is int and not 0 <= value < 2**32 else _TYPES[type(value)]
            header += struct.pack("<I", kind) + _scalar(kind, value)
    for name, dims, kind, offset in tensors:
        header += _text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", n % 2**64) for n in dims)
        header += struct.pack("<IQ", kind % 2**32, offset % 2**64)
    header += bytes(-len(header) % 32)
    return header + np.full(min(described["data_bytes"], 2**16) // 4, 0.5, np.float32).tobytes()


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _scalar(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _text(value)
    code = {4: "<I", 6: "<f", 7: "<?", 10: "<Q"}[kind]
    return struct.pack(code, value % 2**64 if kind == 10 else value)


def safetensors_bytes(header: Any) -> bytes:
    """A safetensors file of this header, sound or not, over zeros."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(2**13)


def safetensors_header(blob: bytes) -> Any:
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length])
