"""Measures the frames in which keys are written: one prompt through the layers, at the start; owns nothing."""

import logging
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxserve.device.programs import Params, ProgramSpec
from jaxserve.device.prompt import prompt_batch
from models.key_frame import NAME, frame_of
from models.layers import rope_tables
from models.llama import Layer, Llama
from models.step import StepBatch
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import XLA

log = logging.getLogger(__name__)

# Of token ids drawn at random: frames of prose are hardly better, and no tokenizer is needed (docs/log.md).
TOKENS = 256
BLOCK_Q = 64
_IDENTITY = {"offset": jnp.zeros, "gain": jnp.ones}


def measure_key_frames(spec: ProgramSpec, params: Params) -> Params:
    """The parameters with the frames that `spec.params` has and `params` lacks; the same in every start.

    Layers are alike, so one is compiled and runs for each: half a second beside the work of one prompt.

    Args:
      params: all others.
    """
    start = time.perf_counter()
    structs, flat = dict(nnx.to_flat_state(spec.params)), dict(nnx.to_flat_state(params))
    flat = {path: flat[path] if path in flat else _identity(path, param) for path, param in structs.items()}
    model: Llama = nnx.merge(spec.graph, nnx.from_flat_state(list(flat.items())))
    batch = prompt_of(spec.num_token_ids)
    config = spec.model
    rotation = rope_tables(config.rope, config.head_dim, batch.positions, batch.rope_lengths)
    pages = KVPages.shapes(2, config.num_kv_heads, TOKENS, config.head_dim, "float32")
    x = model.embed_tokens(batch.token_ids).astype(model.activation_dtype)
    for number, layer in enumerate(model.layers):
        x, frame = _run_layer(*nnx.split(layer), spec.mesh, pages, x, rotation, batch)
        for part, measured in zip(_IDENTITY, frame, strict=True):
            path = ("layers", number, "self_attn", NAME, part)
            flat[path] = flat[path].replace(jax.device_put(measured, structs[path].get_value().sharding))
    log.info("frames of keys measured in %.1f s", time.perf_counter() - start)
    return nnx.from_flat_state(list(flat.items()))


def _identity(path: tuple[Any, ...], param: Any) -> Any:
    struct = param.get_value()
    return param.replace(_IDENTITY[path[-1]](struct.shape, struct.dtype, device=struct.sharding))


@partial(jax.jit, static_argnames=("graph", "mesh", "pages"))
def _run_layer(
    graph: nnx.GraphDef[Layer],
    params: nnx.State,  # type: ignore[type-arg]
    mesh: Mesh,
    pages: KVPages,
    x: Array,
    rotation: tuple[Array, Array],
    batch: StepBatch,
) -> tuple[Array, tuple[Array, Array]]:
    layer = nnx.merge(graph, params)
    q, k, _ = layer.self_attn.queries_keys_values(layer.input_layernorm(x), rotation)
    frame = frame_of(q, k)
    empty = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), pages)
    x, _ = layer(x, rotation, batch, empty, XLA, mesh)
    return x, frame


def prompt_of(num_token_ids: int) -> StepBatch:
    """The prompt that is measured, all of it in page 1."""
    token_ids = np.random.default_rng(0).integers(num_token_ids, size=TOKENS).astype(np.int32)
    return prompt_batch(token_ids, TOKENS, block_q=BLOCK_Q, page_size=TOKENS, pages_per_seq=1)
