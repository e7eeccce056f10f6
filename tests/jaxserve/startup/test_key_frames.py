"""Measured frames: a model's logits stay, and its keys have no offset left."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from llama_reference import llama_logits
from tiny_engine import NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, tiny_config, tiny_params, tiny_weights

from jaxserve.device.sharding import tensor_mesh
from jaxserve.startup.key_frames import TOKENS, measure_key_frames, prompt_of
from jaxserve.startup.loading import program_spec
from models.key_frame import frame_of
from models.layers import rope_tables
from models.step import KVPool
from pallas_kernels.paged_attention import XLA


def test_a_model_with_frames_gives_the_same_logits_and_keys_in_them_have_no_offset_left() -> None:
    spec = program_spec(
        tiny_config(TinyOptions(cache_dtype="int4")), TINY_MODEL, NUM_TOKEN_IDS, tensor_mesh(1, jax.devices())
    )
    params, batch = measure_key_frames(spec, tiny_params()), prompt_of(NUM_TOKEN_IDS)
    pages = KVPool.shapes(spec.model, 2, TOKENS, "float32").layers[0]
    empty = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), pages)

    @jax.jit
    def run(params: nnx.State) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """Logits, and of each layer the measured offset and that of keys and queries in the frame."""
        model, offsets = nnx.merge(spec.graph, params), []
        x = model.embed_tokens(batch.token_ids)
        rotation = rope_tables(TINY_MODEL.rope, TINY_MODEL.head_dim, batch.positions, batch.rope_lengths)
        for layer in model.layers:
            attention = layer.self_attn
            q, k, _ = attention.queries_keys_values(layer.input_layernorm(x), rotation)
            q, k = attention.key_frame(q, k)
            offsets.append((attention.key_frame.offset[...], frame_of(q, k)[0]))
            x, _ = layer(x, rotation, batch, empty, XLA, None)
        return model.logits(model.norm(x)), offsets

    logits, offsets = run(params)
    expected = llama_logits(tiny_weights(), TINY_MODEL, batch.token_ids.tolist())
    np.testing.assert_allclose(np.asarray(logits), expected, atol=2e-3)
    for measured, left in offsets:
        assert np.abs(measured).max() > 0.1
        np.testing.assert_allclose(left, 0, atol=1e-3)
