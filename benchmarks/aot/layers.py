"""Llama-3-8B's layers one after another, as the engine has them, against one layer in a loop: what the compilers say.

Both forms run the same `models.llama.Layer` for a decode step, then the head and the likeliest token. The loop is
`lax.scan` over weights stacked layer by layer; its pages are one pool in which layer i's begin at i * num_pages:
they are updated in place, and no layer's are cut out of a larger array.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.aot.gpu_bytes import bytes_moved
from benchmarks.aot.program import Program, Record, key_of
from benchmarks.aot.steps import LLAMA_3_8B, PAGE_SIZE, ROWS, SOURCES, spec_for
from benchmarks.aot.targets import Target
from benchmarks.aot.tpu_bytes import hbm_bytes
from jaxserve.device.programs import ProgramSpec
from jaxserve.device.sharding import bytes_per_device, replicated
from jaxserve.startup.loading import split_parameters
from models.layers import rope_tables
from models.llama import Layer, Llama
from models.step import KVPool, StepBatch
from pallas_kernels.paged_attention import AttentionRows, Backend, BackendName

COMPARED = ("v5p", "h200")
KEYS = 2048  # of each sequence


def layers(target: Target) -> Iterator[Program]:
    """Both forms with the target's own kernel, where the whole model is on one device."""
    if target.kind not in COMPARED:
        return
    backend = target.backends[0]
    for name in ("unrolled", "scanned"):
        yield Program(
            labels={"name": name, "backend": backend},
            key=key_of((target.topology, name), backend, *SOURCES, "benchmarks/aot/layers.py"),
            measure=partial(_form, target, backend, name),
        )


def _form(target: Target, backend: BackendName, name: str) -> Record:
    spec = spec_for(target, 1, Backend(name=backend))
    spec = replace(spec, num_pages=1 + ROWS * KEYS // PAGE_SIZE, pages_per_seq=KEYS // PAGE_SIZE)
    if name == "unrolled":
        return measured(spec, *unrolled(spec))
    record = measured(spec, *_scanned(spec))
    if backend == "tpu" and "bytes" in record:
        # XLA counts a loop's body once; with two layers in the body, the second is what a turn takes.
        second = measured(spec, *_scanned(spec, unroll=2))["bytes"] - record["bytes"]
        record["bytes"] += (LLAMA_3_8B.num_layers - 1) * second
    return record


def _batch(spec: ProgramSpec) -> StepBatch:
    tokens, none = _ints(spec, ROWS), _ints(spec, 0)
    return StepBatch(
        token_ids=tokens,
        positions=tokens,
        page_ids=tokens,
        offsets=tokens,
        rope_lengths=tokens,
        block_tables=_ints(spec, ROWS, spec.pages_per_seq),
        decode=AttentionRows(tables=tokens, starts=tokens, lengths=tokens),
        prefill=AttentionRows(tables=none, starts=none, lengths=none),
    )


def _ints(spec: ProgramSpec, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=replicated(spec.mesh))


def unrolled(spec: ProgramSpec) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def run(params: Any, kv: KVPool, batch: StepBatch) -> tuple[Array, KVPool]:
        model = nnx.merge(spec.graph, params)
        hidden, kv = model(batch, kv, spec.backend, spec.mesh)
        return jnp.argmax(model.logits(hidden), axis=-1), kv

    return run, (spec.params, spec.state().kv, _batch(spec))


def _scanned(spec: ProgramSpec, unroll: int = 1) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    count = LLAMA_3_8B.num_layers
    one_layer = replace(LLAMA_3_8B, num_layers=1)
    graph, params = split_parameters(one_layer, jnp.dtype("bfloat16"), spec.mesh)
    stacked = jax.tree.map(lambda x: _with_shape(x, (count, *x.shape)), params["layers"][0])
    kv = replace(spec, model=one_layer, num_pages=count * spec.num_pages).state().kv

    def run(params: Any, stacked: Any, kv: KVPool, batch: StepBatch) -> tuple[Array, KVPool]:
        model: Llama = nnx.merge(graph, params)
        layer_graph, _ = nnx.split(model.layers[0])
        x = model.embed_tokens(batch.token_ids)
        rotation = rope_tables(one_layer.rope, one_layer.head_dim, batch.positions, batch.rope_lengths)

        def run_layer(carry: tuple[Array, Any], own: tuple[Any, Array]) -> tuple[tuple[Array, Any], None]:
            (x, pages), (weights, first_page) = carry, own
            layer: Layer = nnx.merge(layer_graph, weights)
            shifted = replace(batch, page_ids=batch.page_ids + first_page, block_tables=batch.block_tables + first_page)
            return layer(x, rotation, shifted, pages, spec.backend, spec.mesh), None

        first_pages = jnp.arange(count, dtype=jnp.int32) * spec.num_pages
        (x, pages), _ = jax.lax.scan(run_layer, (x, kv.layers[0]), (stacked, first_pages), unroll=unroll)
        return jnp.argmax(model.logits(model.norm(x)), axis=-1), KVPool(layers=(pages,))

    return run, (params, stacked, kv, _batch(spec))


def _with_shape(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=replicated(x.sharding.mesh))


def measured(spec: ProgramSpec, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Record:
    """What the compiler says of a program whose last arguments are the pages, donated, and the batch."""
    donated = len(arguments) - 2
    start = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
            traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
            compiled = traced.lower().compile()
    except Exception as error:  # whatever a compiler may throw is a row of the table
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    on_tpu = spec.mesh.devices.flat[0].platform == "tpu"
    weights = bytes_per_device(jax.tree.leaves(spec.params))
    embedding = spec.model.vocab_size * spec.model.hidden_size * 2  # read at a few rows only
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "executable_bytes": len(compiled.runtime_executable().serialize()),
        "bytes": compiled.cost_analysis()["bytes accessed"] if on_tpu else bytes_moved(traced.jaxpr.jaxpr, text),
        "hbm_bytes": hbm_bytes(traced.jaxpr.jaxpr, text) if on_tpu else None,
        "least_bytes": weights - embedding + bytes_per_device(jax.tree.leaves(spec.state().kv)),
    }
