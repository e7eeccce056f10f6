"""Where and how wide keys are before they are narrowed: what few digits need beside the turn; knows no page, no kernel.

Most of a key is an offset that all keys of its head share. Subtracted from every key it lowers all scores of a query
alike, q . (k - c) = q . k - q . c, and softmax does not see it. Nearest to zero, and so most exact, should be the keys
that are attended to. What is left is measured in a unit of its own in each channel, and queries in its inverse, so that
scores stay: a channel that queries hardly look at may be coarse.

    keys [8.1 .2], [7.9 .4]; queries [.1 2], [.2 1]  ->  offset [8 .3]; gain > 1 in the second channel

Both are constants of a model, no part of its checkpoint: whoever loads the weights measures them (with `frame_of`).
Values get none: a prompt's first value is about 0, many queries look at little else, and an offset would be its error.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.config import ModelConfig
from models.layers import parameter

NAME = "key_frame"  # in the parameters' paths
# The least that a channel's keys or queries count, of their head's mean square: a channel that was silent when it was
# measured may speak later.
LEAST = 1e-3


class KeyFrame(nnx.Module):
    """offset, gain: float32[kv_heads * head_dim]."""

    def __init__(self, config: ModelConfig) -> None:
        shape = (config.num_kv_heads * config.head_dim,)
        self.offset = parameter(shape, ("kv_heads",), jnp.dtype(jnp.float32))
        self.gain = parameter(shape, ("kv_heads",), jnp.dtype(jnp.float32))

    def __call__(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Rotated queries and keys, [tokens, heads, head_dim] and [tokens, kv_heads, head_dim], in the frame."""
        kv_heads, head_dim = k.shape[1:]
        offset, gain = (part[...].reshape(kv_heads, head_dim) for part in (self.offset, self.gain))
        grouped = q.astype(jnp.float32).reshape(q.shape[0], kv_heads, -1, head_dim) / gain[:, None]
        return grouped.reshape(q.shape).astype(q.dtype), ((k.astype(jnp.float32) - offset) * gain).astype(k.dtype)


def frame_of(q: Array, k: Array) -> tuple[Array, Array]:
    """Offset and gain for the queries and keys of one prompt, shaped as in `KeyFrame`.

    The offset is the mean key, each counted by the attention that it gets: a prompt's first often gets most of it and
    is unlike all others. The gain makes the channels' errors, gain-weighted by the queries, least: root mean squares of
    k * gain and q / gain are equal. A head of zeros, which a mesh may add, has an offset of 0 and a gain of 1.
    """
    tokens, kv_heads, head_dim = k.shape
    k, q = k.astype(jnp.float32), q.astype(jnp.float32).reshape(tokens, kv_heads, -1, head_dim)
    scores = jnp.einsum("qhgd,khd->hgqk", q, k) * head_dim**-0.5
    attention = jax.nn.softmax(jnp.where(jnp.tri(tokens, dtype=bool), scores, -jnp.inf))
    offset = jnp.einsum("hk,khd->hd", attention.mean(axis=(1, 2)), k)
    key_square = _floored(jnp.square(k - offset).mean(axis=0))
    query_square = _floored(jnp.square(q).mean(axis=(0, 2)))
    silent = (key_square <= 0) | (query_square <= 0)
    gain = jnp.where(silent, 1.0, (query_square / jnp.where(silent, 1.0, key_square)) ** 0.25)
    return offset.ravel(), gain.ravel()


def _floored(square: Array) -> Array:
    return square + LEAST * square.mean(axis=-1, keepdims=True)
