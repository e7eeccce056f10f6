"""The sampler's definition in plain float64 numpy, one row at a time; only the noise is jax's own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.request import SamplingParams

HostArray = np.ndarray[Any, Any]


def reference_scores(
    logits: HostArray,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    bias: HostArray | None = None,
    num_token_ids: int,
) -> HostArray:
    """float64[vocab]: what the noise is added to, or, if greedy, what is maximised.

    Args:
      prompt, output: the tokens that penalties look at.
      bias: what the request's constraints add.
    """
    scores = logits.astype(np.float64)
    scores[num_token_ids:] = -np.inf
    for token in {*prompt, *output}:
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    if bias is not None:
        scores = scores + bias
    if params.temperature == 0:
        return scores
    scores = scores / params.temperature
    if params.top_k > 0:
        boundary = np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
        scores = np.where(scores >= boundary, scores, -np.inf)
    if params.top_p < 1:
        probabilities = softmax(scores)
        descending = np.sort(probabilities)[::-1]
        needed = int(np.searchsorted(np.cumsum(descending), params.top_p))
        scores = np.where(probabilities >= descending[min(needed, len(scores) - 1)], scores, -np.inf)
    if params.min_p > 0:
        probabilities = softmax(scores)
        scores = np.where(probabilities >= params.min_p * probabilities.max(), scores, -np.inf)
    return scores


def reference_bias(
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    end_token_ids: frozenset[int],
    vocab_size: int,
) -> HostArray:
    """float64[vocab]: what a request's constraints (bias, allowed, bad words, min_tokens) add to its next logits."""
    bias = np.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        bias[token] += value
    if params.allowed_token_ids is not None:
        bias[[token for token in range(vocab_size) if token not in params.allowed_token_ids]] = -np.inf
    everything = [*prompt, *output]
    for word in params.bad_word_ids:
        begun = list(word[:-1])
        if not begun or everything[-len(begun) :] == begun:
            bias[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        bias[list(end_token_ids)] = -np.inf
    return bias


def noise(seed: int, positions: Sequence[int], vocab_size: int) -> HostArray:
    """float64[positions, vocab]: Gumbel noise out of the bits of fold_in(key(seed), position), and of nothing else."""
    halves = jnp.array([seed % 2**64 >> 32, seed % 2**32], jnp.uint32)
    bits = np.asarray(_bits(halves, jnp.asarray(positions, jnp.int32), vocab_size), np.float64)
    return -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))


@partial(jax.jit, static_argnums=2)
def _bits(halves: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    key = jax.random.wrap_key_data(halves, impl="threefry2x32")
    keys = jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)
    return jax.vmap(lambda k: jax.random.bits(k, (vocab_size,), jnp.uint32))(keys)


def softmax(scores: HostArray) -> HostArray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def log_softmax(logits: HostArray) -> HostArray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
