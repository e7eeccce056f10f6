"""Quantizes a model layer by layer, with what its matrices are given on some text; writes no file, knows no tokenizer.

The text's hidden states go through the layers one at a time. A layer runs twice: as it is, while the second moments of
what reaches its matrices are summed, and rounded, so that the next layer is fitted to what it will really be given.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxserve.device.prompt import prompt_batch
from jaxserve.errors import ConfigError
from models.checkpoint.base import narrowed, scales_of, zeros_of
from models.config import ModelConfig, Quantization
from models.error_feedback import quantize_with_feedback
from models.layers import Linear, rope_tables
from models.llama import Layer
from models.quantization import QuantizedMatrix, dequantize, group_count
from models.registry import module_for, parameter_structs
from models.step import StepBatch
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import XLA

WINDOW = 512  # tokens that see each other, at most
BLOCK = 32  # tokens: of a block of queries, and of a page
# The matrices that are given the same input, by the one that is watched.
_SAME_INPUT = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}

Progress = Callable[[int, int], None]  # layers done, total


class _Watched(nnx.Module):
    """A linear layer that tells what it is given."""

    def __init__(self, linear: Linear, tell: Callable[[Array], None]) -> None:
        self.linear = linear
        self.tell = tell

    def __call__(self, x: Array) -> Array:
        self.tell(x)
        return self.linear(x)


def quantize_calibrated(
    config: ModelConfig,
    params: Mapping[str, Array],
    token_ids: Sequence[int],
    quantization: Quantization,
    dtype: Any,
    *,
    report: Progress = lambda done, total: None,
) -> dict[str, Array]:
    """The parameters of the quantized model; the layers' matrices are rounded with feedback (`models.error_feedback`).

    The embedding and the head, where they are quantized too, are rounded to the nearest.

    Args:
      config: of the wide model.
      params: the wide model's, float32, by canonical name.
      token_ids: the text, cut into windows; what is left over at its end is not used.
      quantization: of the result.
      dtype: of the result's scales and of what stays wide.

    Raises:
      ConfigError: the text fills no window.
    """
    windows = _windows(config, token_ids)
    expected = parameter_structs(dataclasses.replace(config, quantization=quantization), jnp.dtype(dtype))
    narrow: dict[str, Array] = {}
    for name, array in params.items():
        if not name.startswith("layers."):
            narrow |= narrowed(name, array if scales_of(name) in expected else array.astype(dtype), expected)
    batch = prompt_batch(
        windows[0], len(windows[0]), block_q=BLOCK, page_size=BLOCK, pages_per_seq=len(windows[0]) // BLOCK
    )
    rotation = rope_tables(config.rope, config.head_dim, batch.positions, batch.rope_lengths)
    hidden = [params["embed_tokens.weight"][window] for window in windows]
    graph, state = nnx.split(module_for(config)(config, jnp.dtype(jnp.float32)).layers[0])
    places = nnx.to_flat_state(state)
    watch, run = (
        jax.jit(partial(_watched, graph, config.num_kv_heads)),
        jax.jit(partial(_run, graph, config.num_kv_heads)),
    )
    for number in range(config.num_layers):
        prefix = f"layers.{number}."

        def layer_state(weights: Mapping[str, Array], prefix: str = prefix) -> Any:
            return nnx.from_flat_state(
                [(path, param.replace(weights[prefix + ".".join(map(str, path))])) for path, param in places]
            )

        wide = {name: array for name, array in params.items() if name.startswith(prefix)}
        sums: dict[str, Array] | None = None
        for x in hidden:
            moments = watch(layer_state(wide), x, rotation, batch)
            sums = moments if sums is None else jax.tree.map(jnp.add, sums, moments)
        assert sums is not None
        rounded = dict(wide)
        narrow |= {name: array.astype(dtype) for name, array in wide.items()}
        for watched, names in _SAME_INPUT.items():
            for name in (f"{prefix}{one}.weight" for one in names):
                groups = group_count(quantization, wide[name].shape[1])
                matrix = _quantize(wide[name], sums[watched], quantization.format, groups, dtype)
                rounded[name] = dequantize(matrix, jnp.float32)
                narrow |= {name: matrix.codes, scales_of(name): matrix.scales}
                if matrix.zeros is not None:
                    narrow[zeros_of(name)] = matrix.zeros
        hidden = [run(layer_state(rounded), x, rotation, batch) for x in hidden]
        jax.block_until_ready(hidden)
        report(number + 1, config.num_layers)
    return narrow


_quantize: Callable[..., QuantizedMatrix] = jax.jit(quantize_with_feedback, static_argnums=(2, 3, 4))


def _windows(config: ModelConfig, token_ids: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    size = min(WINDOW, config.max_position) // BLOCK * BLOCK
    if not size or len(token_ids) < size:
        raise ConfigError(
            f"the calibration text has {len(token_ids)} tokens; a window of {size or BLOCK} must be full, and the "
            f"model's context is {config.max_position}"
        )
    return [np.asarray(token_ids[i : i + size], np.int32) for i in range(0, len(token_ids) - size + 1, size)]


def _watched(
    graph: nnx.GraphDef[Layer], kv_heads: int, state: Any, x: Array, rotation: tuple[Array, Array], batch: StepBatch
) -> dict[str, Array]:
    """Of each watched matrix the sum of x xᵀ over its inputs, float32[in, in]."""
    layer = nnx.merge(graph, state)
    moments: dict[str, Array] = {}
    for watched in _SAME_INPUT:
        parent, _, name = watched.partition(".")
        module = getattr(layer, parent)

        def tell(given: Array, watched: str = watched) -> None:
            moments[watched] = jnp.matmul(given.T, given, precision="highest")

        setattr(module, name, _Watched(getattr(module, name), tell))
    _call(layer, kv_heads, x, rotation, batch)
    return moments


def _run(
    graph: nnx.GraphDef[Layer], kv_heads: int, state: Any, x: Array, rotation: tuple[Array, Array], batch: StepBatch
) -> Array:
    return _call(nnx.merge(graph, state), kv_heads, x, rotation, batch)


def _call(layer: Layer, kv_heads: int, x: Array, rotation: tuple[Array, Array], batch: StepBatch) -> Array:
    pages = KVPages.shapes(1 + x.shape[0] // BLOCK, kv_heads, BLOCK, layer.self_attn.head_dim, "float32")
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pages)
    out: Array = layer(x, rotation, batch, empty, XLA, None)[0]
    return out
