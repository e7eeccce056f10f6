"""Whole steps of Llama-3-8B in bfloat16, as the engine compiles them: forward, head, sampler, feedback; no weights."""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot.gpu_bytes import bytes_moved
from benchmarks.aot.program import STEPS, Program, Record, key_of
from benchmarks.aot.targets import Target
from jaxserve.aot.collectives import collectives
from jaxserve.aot.topologies import absent_devices, accelerator
from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, MeshSection, ModelSection, SchedulerSection
from jaxserve.device.buckets import StepShape
from jaxserve.device.programs import ProgramSpec, compile_step, step
from jaxserve.device.sharding import bytes_per_device, tensor_mesh
from jaxserve.startup.loading import program_spec, resolve_for
from models.config import ModelConfig, RopeConfig
from pallas_kernels.paged_attention import Backend, BackendName

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rope=RopeConfig(theta=500000.0),
    eos_token_ids=(128001,),
)
ROWS, KEYS, BLOCKS, PAGE_SIZE = 64, 1024, 8, 16
SOURCES = (*STEPS, "benchmarks/aot/steps.py", "benchmarks/aot/gpu_bytes.py")


def spec_for(target: Target, tensor: int, backend: Backend, model: ModelConfig = LLAMA_3_8B) -> ProgramSpec:
    """64 sequences of 1k tokens and their pages, on so many of the target's devices."""
    mesh = tensor_mesh(tensor, absent_devices(target.topology))
    config = EngineConfig(
        model=ModelSection(path="llama-3-8b", max_model_len=KEYS, dtype="bfloat16", pooling="last"),
        cache=CacheSection(page_size=PAGE_SIZE, num_pages=1 + ROWS * KEYS // PAGE_SIZE),
        scheduler=SchedulerSection(max_num_seqs=ROWS, max_num_batched_tokens=ROWS + BLOCKS * 64),
        execution=ExecutionSection(
            attention_backend="xla", block_q=64, decode_buckets=(ROWS,), prefill_buckets=(BLOCKS,)
        ),
        mesh=MeshSection(tensor=tensor),
    )
    free_bytes = accelerator(target.topology).hbm_bytes
    config = resolve_for(config, model, mesh=mesh, free_bytes=free_bytes)
    return replace(program_spec(config, model, model.vocab_size, mesh), backend=backend)


def steps(target: Target) -> Iterator[Program]:
    """The decode step and the step with prompts beside it; others, to compare, the first of them."""
    for tensor in target.tensors:
        for name in target.backends:
            is_first = name == target.backends[0]
            for blocks in (0, BLOCKS) if is_first else (0,):
                shape = StepShape(decode_rows=ROWS, prefill_blocks=blocks)
                if is_first or target.tensors == (1,):
                    yield Program(
                        labels={"name": str(shape), "backend": name, "tensor": tensor},
                        key=key_of((target.topology, tensor, shape), name, *SOURCES),
                        measure=partial(_measured, target, tensor, name, shape),
                    )


def _measured(target: Target, tensor: int, backend: BackendName, shape: StepShape) -> Record:
    try:
        spec = spec_for(target, tensor, Backend(name=backend))
        weights = bytes_per_device(jax.tree.leaves(spec.params))
        pool = bytes_per_device(jax.tree.leaves(spec.state().kv))
        usable = accelerator(target.topology).usable_bytes
        if weights + pool > usable:
            held = f"weights of {weights / 2**30:.1f} GiB and pages of {pool / 2**30:.1f}"
            return {"skipped": f"{held} do not fit {usable / 2**30:.2f} GiB of {tensor} device(s)"}
        start = time.perf_counter()
        with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
            compiled = compile_step(spec, shape)
    except Exception as error:  # whatever a compiler may throw is a row of the table
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    on_tpu = spec.mesh.devices.flat[0].platform == "tpu"
    moved = (compiled.cost_analysis() or {})["bytes accessed"] if on_tpu else bytes_moved(_jaxpr(spec, shape), text)
    embedding = spec.model.vocab_size * spec.model.hidden_size * 2 // spec.mesh.size  # read at a few rows only
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "bytes": moved,
        "least_bytes": weights - embedding + pool,
        "collectives": [asdict(collective) for collective in collectives(text)],
    }


def _jaxpr(spec: ProgramSpec, shape: StepShape) -> Any:
    """The step before it is compiled: there the kernels' cost estimates stand."""
    layout = spec.layout(shape)
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
        return jax.make_jaxpr(partial(step, spec, layout))(jax.tree.leaves(spec.params), spec.state(), packed).jaxpr
