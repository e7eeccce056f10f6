"""Frames of keys: all of a query's scores change alike, and a head without keys stays one."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.key_frame import KeyFrame, frame_of

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    max_position=8,
)


def uneven() -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of 40 tokens whose channels differ, keys with an offset, and a third head of nothing."""
    rng = np.random.default_rng(0)
    k, spread, offset = rng.standard_normal((40, 3, 16)), rng.uniform(0.1, 3.0, (3, 16)), rng.normal(0, 8, (3, 16))
    q = rng.standard_normal((40, 6, 16)) * rng.uniform(0.1, 3.0, (6, 16))
    k = k * spread + offset
    k[:, 2], q[:, 4:] = 0, 0
    return q.astype(np.float32), k.astype(np.float32)


def framed(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    frame = KeyFrame(CONFIG)
    frame.offset, frame.gain = map(nnx.Param, frame_of(jnp.asarray(q), jnp.asarray(k)))
    framed_q, framed_k = frame(jnp.asarray(q), jnp.asarray(k))
    return np.asarray(framed_q), np.asarray(framed_k)


def test_all_scores_of_a_query_change_alike() -> None:
    q, k = uneven()
    change = np.subtract(*(np.einsum("qhd,khd->hqk", a, b.repeat(2, axis=1)) for a, b in (framed(q, k), (q, k))))
    assert np.abs(change).max() > 10
    np.testing.assert_allclose(change, np.broadcast_to(change[..., :1], change.shape), atol=2e-3)


def test_framed_keys_that_are_attended_to_lie_around_zero_with_channels_as_loud_as_their_queries() -> None:
    q, k = uneven()
    framed_q, framed_k = framed(q, k)
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(2, axis=1)) / 16**0.5
    scores[:, np.triu(np.ones((40, 40), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    attention = (weights / weights.sum(axis=2, keepdims=True)).reshape(3, 80, 40).mean(axis=1)
    np.testing.assert_allclose(np.einsum("hk,khd->hd", attention, framed_k), 0, atol=1e-3)
    key, query = (
        np.sqrt(np.square(x).mean(axis=axes)) for x, axes in ((framed_k, 0), (framed_q.reshape(40, 3, 2, 16), (0, 2)))
    )
    ratio = (key / np.where(query, query, 1))[:2]
    assert ratio.max() < 1.3 * ratio.min()  # but for what a silent channel may say later


def test_a_head_of_zeros_has_no_offset_and_a_gain_of_one() -> None:
    offset, gain = (np.asarray(x).reshape(3, 16) for x in frame_of(*map(jnp.asarray, uneven())))
    assert (offset[2] == 0).all()
    assert (gain[2] == 1).all()
