"""Logits to tokens, on the device: penalties, bias, temperature, top-k, top-p, min-p, a draw; does not know requests.

Every row is computed by itself, and its randomness is `fold_in(key(seed), position)`: the result depends neither on the
slot, the batch nor the step. Whatever no row of a step asks for is skipped at run time (`lax.cond`), so one compiled
program serves every mixture of parameters.

Top-k and top-p find their threshold by bisection over the bits of the float32 logits: exact, with no sort of the
vocabulary, and a tie at the threshold is kept whole.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.request import MAX_LOGPROBS

FLOAT32_MAX = float(np.finfo(np.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """The rows that sample in this step; padding rows use the dummy slot.

    Attributes:
      tokens: int32[rows], whose hidden state each row samples from.
      slots, positions: int32[rows]; a position is the one that the new token will have.
      seeds: uint32[rows, 2], the high and low half of a 64-bit seed.
      is_constrained, is_penalized, wants_logprobs: bool[rows].
      temperature … frequency_penalty: [rows], as in `SamplingParams`.
    """

    tokens: Array
    slots: Array
    positions: Array
    seeds: Array
    is_constrained: Array
    is_penalized: Array
    wants_logprobs: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplerState:
    """What the sampler keeps per slot. Rows are written by the host when a request that needs them comes to a slot.

    Attributes:
      bias: float32[slots, vocab], see `constraints`.
      output_counts: int32[slots, vocab], how often the output holds each token.
      in_prompt: bool[slots, vocab].
    """

    bias: Array
    output_counts: Array
    in_prompt: Array

    @staticmethod
    def zeros(slots: int, vocab_size: int) -> "SamplerState":
        shape = (slots, vocab_size)
        return SamplerState(
            bias=jnp.zeros(shape, jnp.float32),
            output_counts=jnp.zeros(shape, jnp.int32),
            in_prompt=jnp.zeros(shape, jnp.bool_),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Logprobs:
    """Log-probabilities of chosen tokens and of the likeliest, best first: [rows], [rows, 20], [rows, 20]."""

    chosen: Array
    top_ids: Array
    top: Array


def sample(logits: Array, rows: SampleRows, state: SamplerState, num_token_ids: int) -> tuple[Array, Logprobs]:
    """Chooses each row's next token.

    Args:
      logits: float32[rows, vocab].
      num_token_ids: ids at or beyond this are padding of the vocabulary and never chosen.

    Returns:
      int32[rows] tokens, and their log-probabilities under the model's own distribution: before penalties, bias and
      temperature. The latter are zeros in a step in which no row wants them.
    """
    if num_token_ids < logits.shape[1]:
        logits = jnp.where(jnp.arange(logits.shape[1]) < num_token_ids, logits, -jnp.inf)
    # On the CPU a branch that is not taken still costs a copy of the logits: in greedy steps all of them hang on one.
    is_plain = ~(rows.is_penalized | rows.is_constrained | (rows.temperature > 0))
    tokens = jax.lax.cond(
        is_plain.all(),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
        lambda: jnp.argmax(_adjust(logits, rows, state), axis=-1).astype(jnp.int32),
    )
    logprobs = jax.lax.cond(
        rows.wants_logprobs.any(),
        lambda: score(logits, tokens),
        lambda: no_scores(tokens.shape),
    )
    return tokens, logprobs


def _adjust(logits: Array, rows: SampleRows, state: SamplerState) -> Array:
    """The scores whose argmax is each row's token, by the stated order; noise makes it a draw."""
    scores = _if_any(rows.is_penalized, lambda x: _penalize(x, rows, state), logits)
    scores = _if_any(rows.is_constrained, lambda x: _constrain(x, rows, state), scores)
    # Greedy rows share the program: a temperature of 1 leaves their order as it is. For the others the best score moves
    # to 0 first, where no temperature, however small, can make it overflow.
    is_random = rows.temperature > 0
    peaks = jnp.where(is_random, scores.max(-1), 0.0)
    scores = (scores - peaks[:, None]) / jnp.where(is_random, rows.temperature, 1.0)[:, None]
    scores = _if_any(is_random & (rows.top_k > 0), lambda x: _keep_top_k(x, rows.top_k), scores)
    scores = _if_any(is_random & (rows.top_p < 1), lambda x: _keep_top_p(x, rows.top_p), scores)
    scores = _if_any(is_random & (rows.min_p > 0), lambda x: _keep_min_p(x, rows.min_p), scores)
    return _if_any(is_random, lambda x: x + _noise(rows, x.shape[1], is_random), scores)


def score(logits: Array, tokens: Array) -> Logprobs:
    """Log-probabilities of `tokens` and of the likeliest ones: logits [rows, vocab], tokens int32[rows]."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    short = MAX_LOGPROBS - top.shape[1]
    return Logprobs(
        chosen=jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0],
        top_ids=jnp.pad(top_ids, ((0, 0), (0, short))),
        top=jnp.pad(top, ((0, 0), (0, short)), constant_values=-jnp.inf),
    )


def no_scores(shape: tuple[int, ...]) -> Logprobs:
    wide = (*shape, MAX_LOGPROBS)
    return Logprobs(chosen=jnp.zeros(shape), top_ids=jnp.zeros(wide, jnp.int32), top=jnp.zeros(wide))


def count_tokens(state: SamplerState, rows: SampleRows, tokens: Array) -> SamplerState:
    """Counts each row's new token. Rows without penalties are counted too: their row is rewritten before it is read."""
    return dataclasses.replace(state, output_counts=state.output_counts.at[rows.slots, tokens].add(1))


def _if_any(wanted: Array, change: Callable[[Array], Array], scores: Array) -> Array:
    """Applies `change` if any row wants it. It must leave the rows that do not want it as they are."""
    return jax.lax.cond(wanted.any(), change, lambda x: x, scores)


def _penalize(scores: Array, rows: SampleRows, state: SamplerState) -> Array:
    counts = state.output_counts[rows.slots]
    is_seen = (counts > 0) | state.in_prompt[rows.slots]
    repetition = rows.repetition_penalty[:, None]
    penalized = jnp.where(is_seen, jnp.where(scores > 0, scores / repetition, scores * repetition), scores)
    penalized = jnp.minimum(penalized, FLOAT32_MAX)  # where the penalty is next to nothing
    penalized -= rows.frequency_penalty[:, None] * counts + rows.presence_penalty[:, None] * (counts > 0)
    return jnp.where(rows.is_penalized[:, None], penalized, scores)


def _constrain(scores: Array, rows: SampleRows, state: SamplerState) -> Array:
    return jnp.where(rows.is_constrained[:, None], scores + state.bias[rows.slots], scores)


def _keep_top_k(scores: Array, top_k: Array) -> Array:
    def count(is_kept: Array) -> Array:
        return is_kept.sum(-1, dtype=jnp.int32)

    return jnp.where((top_k > 0)[:, None], _above_threshold(scores, count, top_k), scores)


def _keep_top_p(scores: Array, top_p: Array) -> Array:
    probabilities = jax.nn.softmax(scores, axis=-1)
    ones = jnp.ones(scores.shape[1])

    def mass(is_kept: Array) -> Array:
        return jnp.dot(jnp.where(is_kept, probabilities, 0.0), ones, precision=jax.lax.Precision.HIGHEST)

    # Against the sum as it was rounded: at top_p = 0.9999999 the kept mass must still be reachable.
    wanted = top_p * mass(jnp.ones_like(scores, jnp.bool_))
    return jnp.where((top_p < 1)[:, None], _above_threshold(scores, mass, wanted), scores)


def _keep_min_p(scores: Array, min_p: Array) -> Array:
    floor = scores.max(-1, keepdims=True) + jnp.log(min_p)[:, None]  # log(0) = -inf keeps everything
    return jnp.where(scores >= floor, scores, -jnp.inf)


def _above_threshold(scores: Array, measure: Callable[[Array], Array], wanted: Array) -> Array:
    """Keeps the fewest of each row's highest scores whose measure reaches `wanted`; the others become -inf.

    Bisection over the scores' order-preserving integer form: `low` always reaches what is wanted, `high` never does.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # -0.0 sorts below 0.0, which only splits that tie

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # the mean, rounded up, without overflow
        reaches = measure(order >= middle[:, None]) >= wanted
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle - 1)

    low, high = order.min(-1), order.max(-1)
    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(order >= low[:, None], scores, -jnp.inf)


def _noise(rows: SampleRows, vocab_size: int, is_random: Array) -> Array:
    """Gumbel noise: the argmax of scores + noise is a draw from softmax(scores).

    From one 32-bit number a token, fine where it matters: a small v is exact, so large noise is not cut off at 16.6 as
    with uniform floats, at a quarter of the cost of drawing two numbers.
    """

    def row_bits(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    v = (jax.vmap(row_bits)(rows.seeds, rows.positions).astype(jnp.float32) + 0.5) * 2.0**-32  # (0, 1]
    return jnp.where(is_random[:, None], -jnp.log(-jnp.log1p(-v)), 0.0)
