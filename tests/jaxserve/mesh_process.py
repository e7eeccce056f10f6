"""Runs in a process of eight virtual CPU devices: engines of every width, and restored weights; prints what it saw.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python mesh_process.py FOLDER > seen.json

One process for all widths: starting one and importing jax costs more than running the tiny models.
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import write_gguf, write_hf

from jaxserve.aot.fit import measure_fit
from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, MeshSection, ModelSection, SchedulerSection
from jaxserve.device.sharding import tensor_mesh
from jaxserve.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.startup.loading import load_engine, load_params, split_parameters
from models.checkpoint import open_checkpoint, save_orbax
from models.config import Quantization
from models.partition import Partition
from models.registry import parameter_structs
from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.quantized_matmul import gpu_triton
from pallas_kernels.quantized_matmul.api import on_mesh

NUM_TOKEN_IDS = 150
VOCAB_SIZE = 157  # a prime, as are the MLP's columns: nothing divides but what should
QUERY_HEADS = {1: 4, 3: 6, 8: 8}  # by KV heads
WIDTHS = (1, 2, 4, 8)
FORMATS = ("safetensors", "gguf", "orbax")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    vocab_size: int = NUM_TOKEN_IDS
    eos_token_ids: tuple[int, ...] = ()


def model_json(kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 53,
        "num_hidden_layers": 1,
        "num_attention_heads": QUERY_HEADS[kv_heads],
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "tie_word_embeddings": kv_heads == 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow:
    """Weights of few bits, pages with them, and the model that has both."""

    weights: Quantization
    pages: KVDtype
    model: dict[str, Any]


GROUP = 8  # inputs of an int4 scale: of the even model's matrices, four devices get two groups each
NARROW = {
    narrow.weights.format: narrow
    for narrow in (
        Narrow(weights=Quantization(format="int8", embeddings=True), pages="int8", model=model_json(3)),
        Narrow(weights=Quantization(format="fp8_e4m3"), pages="int4", model=model_json(3)),
        Narrow(
            weights=Quantization.made_at_load("int4", group_size=GROUP, embeddings=False),
            pages="float32",
            model=model_json(3) | {"num_key_value_heads": 2, "num_attention_heads": 8, "intermediate_size": 64},
        ),
    )
}


def main(folder: Path) -> None:
    assert jax.device_count() == 8
    seen: dict[str, Any] = {"tokens": {}, "logprobs": {}, "restored": {}, "narrow": {}, "products": products_apart()}
    for kv_heads in QUERY_HEADS:
        paths = write_checkpoints(folder / str(kv_heads), model_json(kv_heads))
        for width in WIDTHS:
            # Every width reads another format, so that equal tokens prove the restoring too.
            engine = load_engine(engine_config(paths[FORMATS[width % 3]], width), Vocabulary())
            tokens, logprobs = run(engine)
            seen["tokens"][f"{kv_heads}/{width}"] = tokens
            seen["logprobs"][f"{kv_heads}/{width}"] = logprobs
        if kv_heads == 8:
            seen["collectives"] = step_collectives(engine_config(paths["orbax"], 8))
        if kv_heads == 3:
            engine = load_engine(engine_config(paths["orbax"], 4, host_pages=20), Vocabulary())
            seen["host_tier"] = [run(engine)[0], run(engine)[0]]
            seen["restored_pages"] = engine.stats().host_pages_restored_total
            simulated = engine_config(paths["safetensors"], 2, backend="tpu")
            seen["simulated"] = run(load_engine(simulated, Vocabulary()), requests=2, max_tokens=3)[0]
            for width in WIDTHS:
                for name, path in paths.items():
                    seen["restored"][f"{name}/{width}"] = restored_faults(path, paths["safetensors"], width)
    for name, narrow in NARROW.items():
        for width, path in write_narrow(folder / name, narrow).items():
            engine = load_engine(engine_config(path, width, narrow=narrow), Vocabulary())
            seen["narrow"][f"{name}/{width}"] = run(engine)
    json.dump(seen, sys.stdout)


def products_apart() -> dict[str, float]:
    """How far products with a 4-bit matrix by two devices are from one device's, against the largest number."""
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=(4, 256)), jnp.bfloat16)
    codes = jnp.asarray(rng.integers(-8, 8, (128, 256)), jnp.int4)
    scales, zeros = (jnp.asarray(rng.uniform(0.5, 2, (128, 8)), jnp.bfloat16) for _ in range(2))
    kernel = partial(gpu_triton.quantized_matmul, interpret=True)
    alone = np.asarray(jax.jit(kernel)(x, codes, scales, zeros), np.float32)
    apart = {}
    for axis, spec in (("outputs", PartitionSpec("tensor")), ("inputs", PartitionSpec(None, "tensor"))):
        mesh = tensor_mesh(2, jax.devices())
        split = [jax.device_put(array, NamedSharding(mesh, spec)) for array in (codes, scales, zeros)]
        run = on_mesh(kernel, mesh.abstract_mesh, has_whole_inputs=axis == "outputs")
        out = np.asarray(jax.jit(run)(x, *split), np.float32)
        apart[axis] = float(np.abs(out - alone).max() / np.abs(alone).max())
    return apart


def step_collectives(config: EngineConfig) -> list[list[list[Any]]]:
    """Kind, result and count of what travels in each step's program."""
    model = open_checkpoint(Path(config.model.path)).config
    fit = measure_fit(config, model, jax.devices(), usable_bytes=2**30)
    return [[[c.kind, c.result, c.result_bytes, c.count] for c in program.collectives] for program in fit.programs]


def write_checkpoints(folder: Path, config: dict[str, Any]) -> dict[str, Path]:
    hf = write_hf(folder / "hf", config)
    checkpoint = open_checkpoint(hf)
    params = checkpoint.load(parameter_structs(checkpoint.config, jnp.dtype(jnp.float32)))
    save_orbax(folder / "orbax", checkpoint.config, params)
    return {
        "safetensors": hf,
        "orbax": folder / "orbax",
        "gguf": write_gguf(folder / "model.gguf", config),
    }


def write_narrow(folder: Path, narrow: Narrow) -> dict[int, Path]:
    """Checkpoints of the same quantized model, by the width that reads them: two devices read what was quantized
    before, the others quantize while they load, each device its own part."""
    hf = write_hf(folder / "hf", narrow.model)
    checkpoint = open_checkpoint(hf)
    config = replace(checkpoint.config, quantization=narrow.weights)
    save_orbax(folder / "orbax", config, checkpoint.load(parameter_structs(config, jnp.dtype(jnp.float32))))
    return {1: hf, 2: folder / "orbax", 4: hf}


def engine_config(
    path: Path,
    width: int,
    *,
    backend: Literal["auto", "tpu"] = "auto",
    narrow: Narrow | None = None,
    host_pages: int = 0,
) -> EngineConfig:
    """Args: host_pages: with any, the device has hardly more pages than one request needs."""
    num_pages = 1 + (8 if host_pages else 4 * 6)
    model = {"path": str(path), "dtype": "float32", "max_model_len": 48}
    if narrow is not None:
        model |= {
            "quantization": narrow.weights.format,
            "quantization_group_size": GROUP,
            "quantize_embeddings": narrow.weights.embeddings,
        }
    pages = "float32" if narrow is None else narrow.pages
    return EngineConfig(
        model=ModelSection.model_validate(model),
        cache=CacheSection(page_size=8, num_pages=num_pages, dtype=pages, host_pages=host_pages),
        scheduler=SchedulerSection(max_num_seqs=4, max_num_batched_tokens=20),
        execution=ExecutionSection(
            attention_backend=backend,
            matmul_backend="auto" if narrow is None else "xla",  # as a mesh of CPUs has to
            block_q=8,
            decode_buckets=(4,),
            prefill_buckets=(2,),
            compilation_cache=None,
        ),
        mesh=MeshSection(tensor=width),
    )


def run(engine: Engine, *, requests: int = 6, max_tokens: int = 10) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and logprobs of requests that use every part of the sampler, more of them than slots."""
    rng = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logit_bias": {7: 4.0, 149: 3.0}, "logprobs": 1},
    ][:requests]
    for i, kind in enumerate(kinds):
        prompt = rng.integers(0, NUM_TOKEN_IDS, 5 + 5 * i).tolist()
        engine.add(str(i), prompt, SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True, **kind))
    tokens: list[list[int]] = [[] for _ in kinds]
    logprobs: list[list[float]] = [[] for _ in kinds]
    while engine.has_work():
        for output in engine.step():
            index = int(output.request_id)
            tokens[index] += output.token_ids
            entries = (*(output.prompt_logprobs or ()), *(output.logprobs or ()))
            logprobs[index] += [value for e in entries if e for value in (e.logprob, *(top for _, top in e.top))]
    engine.check_integrity()
    return tokens, logprobs


def restored_faults(path: Path, reference: Path, width: int) -> list[str]:
    """What is wrong with the weights of `path` as restored over `width` devices; nothing, one hopes."""
    checkpoint = open_checkpoint(path)
    mesh = tensor_mesh(width, jax.devices())
    _, structs = split_parameters(checkpoint.config, jnp.dtype(jnp.float32), mesh)
    loaded = dict(nnx.to_flat_state(load_params(checkpoint, structs, mesh)))
    stored = open_checkpoint(reference)
    whole = stored.load(parameter_structs(stored.config, jnp.dtype(jnp.float32)))
    partition = Partition(model=checkpoint.config, tensor=width)
    faults = []
    for path_of, struct in nnx.to_flat_state(structs):
        name, array, axes = ".".join(map(str, path_of)), loaded[path_of].get_value(), struct.get_metadata("axes")
        expected = np.asarray(whole[name])
        spread = partition.spread(axes)
        if not np.array_equal(np.asarray(array), expected if spread is None else spread.apply(expected)):
            faults.append(f"{name}: other values")
        is_split = any(axis not in (None, "embed") for axis in axes)
        shares = {math.prod(shard.data.shape) * (width if is_split else 1) for shard in array.addressable_shards}
        if array.sharding != struct.get_value().sharding or shares != {array.size}:
            faults.append(f"{name}: a device holds {shares} of {array.size}")
    return faults


if __name__ == "__main__":
    main(Path(sys.argv[1]))
