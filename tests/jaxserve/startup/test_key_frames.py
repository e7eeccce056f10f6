"""Measured frames: a model's logits stay, and its keys are written around zero."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from llama_reference import llama_logits
from tiny_engine import NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, tiny_config, tiny_params, tiny_weights

from jaxserve.device.sharding import tensor_mesh
from jaxserve.startup.key_frames import TOKENS, measure_key_frames, prompt_of
from jaxserve.startup.loading import program_spec
from models.step import KVPool


def test_a_model_with_frames_gives_the_same_logits_and_writes_keys_around_zero() -> None:
    spec = program_spec(
        tiny_config(TinyOptions(cache_dtype="int4")), TINY_MODEL, NUM_TOKEN_IDS, tensor_mesh(1, jax.devices())
    )
    params, batch = measure_key_frames(spec, tiny_params()), prompt_of(NUM_TOKEN_IDS)
    pool = KVPool.shapes(spec.model, 2, TOKENS, "float32")
    empty = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), pool)

    @jax.jit
    def run(params: nnx.State, kv: KVPool) -> tuple[jax.Array, KVPool]:
        model = nnx.merge(spec.graph, params)
        hidden, kv = model(batch, kv)
        return model.logits(hidden), kv

    logits, kv = run(params, empty)
    expected = llama_logits(tiny_weights(), TINY_MODEL, batch.token_ids.tolist())
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-3)
    for layer, pages in zip(params["layers"].values(), kv.layers, strict=True):
        offset = layer["self_attn"]["key_frame"]["offset"].get_value()
        mean = pages.data[1, :, :, : TINY_MODEL.head_dim].mean(axis=1)
        assert np.abs(offset).max() > 0.1
        np.testing.assert_allclose(mean, 0, atol=1e-3)
