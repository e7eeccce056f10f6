"""The sampler against its float64 definition, and claims about each of its parts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_reference import HostArray, log_softmax, noise, reference_scores, softmax
from scipy.stats import chi2

from jaxserve.device.sampling import Logprobs, SampleRows, SamplerState, count_tokens, sample
from jaxserve.request import MAX_LOGPROBS, SamplingParams

VOCAB = 97
NUM_TOKEN_IDS = 90
ROWS = 64

run_sample = jax.jit(sample, static_argnames="num_token_ids")


def make_rows(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    constrained: Sequence[bool] | None = None,
) -> SampleRows:
    count = len(params)
    seeds = [(p.seed or 0) % 2**64 for p in params] if seeds is None else seeds

    def column(name: str, dtype: Any) -> jax.Array:
        return jnp.array([getattr(p, name) for p in params], dtype)

    return SampleRows(
        tokens=jnp.arange(count, dtype=jnp.int32),
        slots=jnp.array(range(count) if slots is None else slots, jnp.int32),
        positions=jnp.array([5] * count if positions is None else positions, jnp.int32),
        seeds=jnp.array([(seed >> 32, seed % 2**32) for seed in seeds], jnp.uint32),
        is_constrained=jnp.array([False] * count if constrained is None else constrained),
        is_penalized=jnp.array([p.uses_penalties for p in params]),
        wants_logprobs=jnp.array([p.logprobs is not None for p in params]),
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        repetition_penalty=column("repetition_penalty", jnp.float32),
        presence_penalty=column("presence_penalty", jnp.float32),
        frequency_penalty=column("frequency_penalty", jnp.float32),
    )


def draw(logits: HostArray, rows: SampleRows, state: SamplerState | None = None) -> HostArray:
    return draw_with_logprobs(logits, rows, state)[0]


def draw_with_logprobs(
    logits: HostArray, rows: SampleRows, state: SamplerState | None = None
) -> tuple[HostArray, Logprobs]:
    state = SamplerState.zeros(logits.shape[0], logits.shape[1]) if state is None else state
    num_token_ids = min(NUM_TOKEN_IDS, logits.shape[1])
    tokens, logprobs = run_sample(jnp.asarray(logits, jnp.float32), rows, state, num_token_ids=num_token_ids)
    return np.asarray(tokens), logprobs


def random_logits(rng: np.random.Generator, *shape: int) -> HostArray:
    """Multiples of 1/8, so that there are many exact ties."""
    return (np.round(rng.standard_normal(shape) * 16) / 8).astype(np.float32)


def draws_of_one_row(logits: Sequence[float], params: SamplingParams, count: int = 512) -> HostArray:
    """`count` draws from the same logits, at positions 0, 1, 2, ..."""
    wide = np.full((count, VOCAB), -30.0, np.float32)
    wide[:, : len(logits)] = logits
    return draw(wide, make_rows([params] * count, positions=range(count)))


MIXTURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": [0.0]},
    "temperature": {"temperature": [0.0, 0.01, 0.5, 1.0, 3.0, 100.0]},
    "top_k": {"top_k": [-1, 0, 1, 2, 7, 89, 90, 91, 97, 98, 2**31 - 1]},
    "top_p": {"top_p": [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]},
    "min_p": {"min_p": [0.0, 0.01, 0.3, 1.0]},
    "penalties": {
        "repetition_penalty": [0.5, 1.0, 1.3, 100.0],
        "presence_penalty": [-2.0, 0.0, 0.7],
        "frequency_penalty": [0.0, 0.4, 2.0],
        "temperature": [0.0, 0.8],
    },
    "everything": {
        "temperature": [0.0, 0.6, 1.0, 1.7],
        "top_k": [0, 3, 40],
        "top_p": [0.3, 0.9, 1.0],
        "min_p": [0.0, 0.05],
        "repetition_penalty": [1.0, 1.2],
        "presence_penalty": [0.0, 0.5],
        "frequency_penalty": [0.0, -0.5],
        "logprobs": [None, 4],
    },
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("with_constraints", [False, True])
def test_tokens_are_those_of_the_definition(mixture: str, with_constraints: bool) -> None:
    rng = np.random.default_rng(len(mixture))
    logits = random_logits(rng, ROWS, VOCAB)
    params = [
        SamplingParams(
            seed=int(rng.integers(-(2**63), 2**63)), **{k: rng.choice(v) for k, v in MIXTURES[mixture].items()}
        )
        for _ in range(ROWS)
    ]
    prompts = [rng.integers(0, NUM_TOKEN_IDS, 20).tolist() for _ in range(ROWS)]
    outputs = [rng.integers(0, NUM_TOKEN_IDS, rng.integers(0, 30)).tolist() for _ in range(ROWS)]
    bias = np.where(rng.random((ROWS, VOCAB)) < 0.5, -np.inf, random_logits(rng, ROWS, VOCAB))
    constrained = [with_constraints and bool(rng.random() < 0.7) for _ in range(ROWS)]
    positions = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    slots = rng.permutation(ROWS)
    counts, in_prompt = np.zeros((ROWS, VOCAB), np.int32), np.zeros((ROWS, VOCAB), bool)
    slot_bias = np.zeros((ROWS, VOCAB), np.float32)
    for row, slot in enumerate(slots):
        np.add.at(counts[slot], outputs[row], 1)
        in_prompt[slot, prompts[row]] = True
        slot_bias[slot] = bias[row]
    state = SamplerState(
        bias=jnp.asarray(slot_bias), output_counts=jnp.asarray(counts), in_prompt=jnp.asarray(in_prompt)
    )
    tokens = draw(logits, make_rows(params, positions=positions, slots=slots, constrained=constrained), state)
    for row in range(ROWS):
        scores = reference_scores(
            logits[row],
            params[row],
            prompt=prompts[row],
            output=outputs[row],
            bias=bias[row] if constrained[row] else None,
            num_token_ids=NUM_TOKEN_IDS,
        )
        if params[row].temperature > 0:
            scores = scores + noise(params[row].seed, [positions[row]], VOCAB)[0]
        assert tokens[row] == scores.argmax(), (row, params[row])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=2.5),
        SamplingParams(seed=3, top_k=5),
        SamplingParams(seed=4, top_p=0.8),
        SamplingParams(seed=5, min_p=0.1),
        SamplingParams(seed=6, temperature=0.7, top_k=12, top_p=0.95, min_p=0.02),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = (np.random.default_rng(8).standard_normal(30) * 1.5).astype(np.float32)
    count, at_once = 16384, 1024
    expected = softmax(reference_scores(logits, params, num_token_ids=30)) * count
    seen = np.zeros(30)
    for start in range(0, count, at_once):
        rows = make_rows([params] * at_once, positions=range(start, start + at_once))
        seen += np.bincount(draw(np.tile(logits, (at_once, 1)), rows), minlength=30)
    assert not seen[expected == 0].any(), "a token was drawn that had been cut off"
    likely = expected >= 5
    statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi2.sf(statistic, likely.sum() - 1) > 1e-3


def test_seeds_differ_in_all_their_64_bits() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    tokens = draw(logits, make_rows([SamplingParams()] * ROWS, seeds=[1 << bit for bit in range(64)]))
    assert len(set(tokens.tolist())) > 30  # 64 draws of 90 equal tokens: 46 different ones are expected


def test_a_seed_is_the_jax_key_of_that_number() -> None:
    key = jax.random.fold_in(jax.random.key(1234, impl="threefry2x32"), 17)
    # Among equal scores the least bits win: the noise falls as they grow.
    expected = jax.random.bits(key, (VOCAB,), jnp.uint32)[:NUM_TOKEN_IDS].argmin()
    rows = make_rows([SamplingParams(seed=1234)] * ROWS, positions=[17] * ROWS)
    assert (draw(np.zeros((ROWS, VOCAB), np.float32), rows) == int(expected)).all()


def test_a_draw_depends_neither_on_slot_nor_row_nor_batch() -> None:
    rng = np.random.default_rng(4)
    logits = random_logits(rng, ROWS, VOCAB)
    params = [SamplingParams(seed=row // 2, temperature=0.9, top_p=0.95) for row in range(ROWS)]
    positions = rng.integers(0, 1000, ROWS)
    tokens = draw(logits, make_rows(params, positions=positions))
    order = rng.permutation(ROWS)
    rows = make_rows([params[i] for i in order], positions=positions[order], slots=rng.permutation(ROWS))
    np.testing.assert_array_equal(draw(logits[order], rows), tokens[order])
    for row in (0, 31):
        alone = draw(logits[row : row + 1], make_rows([params[row]], positions=[positions[row]]))
        assert alone[0] == tokens[row]


def test_the_same_seed_draws_anew_at_each_position() -> None:
    assert len(set(draws_of_one_row([0.0] * 90, SamplingParams(seed=3)).tolist())) > 80


def test_greedy_takes_the_first_of_equals_and_ignores_filters_seed_and_neighbours() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [30, 20, 40]] = 2.0
    greedy = SamplingParams(temperature=0.0, seed=9, top_p=0.5, top_k=3, min_p=0.5)
    params = [greedy if row % 2 else SamplingParams(seed=row, top_k=50, top_p=0.9) for row in range(ROWS)]
    assert (draw(logits, make_rows(params))[1::2] == 20).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1.2e-38, 1e-45])
def test_the_smallest_temperatures_come_to_the_best_token(temperature: float) -> None:
    tokens = draws_of_one_row([4.0, 40.0, 41.0, 5.0], SamplingParams(temperature=temperature, seed=1))
    assert set(tokens.tolist()) == {2}


def test_a_tie_at_top_k_is_kept_whole() -> None:
    tokens = draws_of_one_row([3.0, 2.0, 2.0, 2.0, 1.0], SamplingParams(top_k=2, seed=1))
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_a_tie_at_top_p_is_kept_whole_and_no_more() -> None:
    # Probabilities 0.4, 0.2, 0.2, 0.2: the first two reach 0.5, the others equal the second.
    logits = np.log([0.4, 0.2, 0.2, 0.2]).tolist()
    assert set(draws_of_one_row(logits, SamplingParams(top_p=0.5, seed=1)).tolist()) == {0, 1, 2, 3}
    assert set(draws_of_one_row(logits, SamplingParams(top_p=0.39, seed=1)).tolist()) == {0}


def test_the_smallest_top_p_keeps_the_best_token() -> None:
    tokens = draws_of_one_row([1.0, 1.1, 0.9], SamplingParams(top_p=1e-30, seed=1))
    assert set(tokens.tolist()) == {1}


def test_top_k_beyond_the_vocabulary_and_top_p_next_to_1_change_nothing() -> None:
    logits = random_logits(np.random.default_rng(2), 1, NUM_TOKEN_IDS)[0].tolist()
    plain = draws_of_one_row(logits, SamplingParams(seed=5))
    for params in (SamplingParams(seed=5, top_k=VOCAB + 1), SamplingParams(seed=5, top_p=0.9999999)):
        np.testing.assert_array_equal(draws_of_one_row(logits, params), plain)


def test_min_p_of_1_keeps_only_the_best_and_its_equals() -> None:
    tokens = draws_of_one_row([2.0, 2.0, 1.9], SamplingParams(min_p=1.0, seed=1))
    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=100.0, seed=1),
        SamplingParams(top_k=2**31 - 1, seed=2),
        SamplingParams(top_p=0.9999999, temperature=50.0, seed=3),
        SamplingParams(repetition_penalty=1e-40, presence_penalty=-2.0, min_p=0.1, seed=4),
        SamplingParams(repetition_penalty=100.0, temperature=1e-30, min_p=0.5, top_p=0.1, seed=5),
    ],
    ids=["greedy", "hot", "top_k", "top_p", "penalty_of_nearly_0", "penalty_of_100"],
)
def test_padding_ids_are_never_chosen_however_high_their_logits(params: SamplingParams) -> None:
    logits = np.tile(random_logits(np.random.default_rng(1), 1, VOCAB), (512, 1))
    logits[:, NUM_TOKEN_IDS:] = 1e4
    is_real = jnp.tile(jnp.arange(VOCAB) < NUM_TOKEN_IDS, (512, 1))
    everything_seen = SamplerState(
        bias=jnp.full((512, VOCAB), 100.0), output_counts=is_real.astype(jnp.int32), in_prompt=is_real
    )
    rows = make_rows([params] * 512, positions=range(512), constrained=[True] * 512)
    tokens, logprobs = draw_with_logprobs(
        logits, dataclasses.replace(rows, wants_logprobs=jnp.ones(512, jnp.bool_)), everything_seen
    )
    assert tokens.min() >= 0
    assert tokens.max() < NUM_TOKEN_IDS
    assert np.asarray(logprobs.top_ids).max() < NUM_TOKEN_IDS
    assert np.isfinite(np.asarray(logprobs.chosen)).all()


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 3
    params = [
        SamplingParams(seed=row, temperature=0.5, top_k=5, repetition_penalty=2.0, presence_penalty=1.0, logprobs=20)
        for row in range(ROWS)
    ]
    state = SamplerState(
        bias=jnp.full((ROWS, VOCAB), 3.0),
        output_counts=jnp.ones((ROWS, VOCAB), jnp.int32),
        in_prompt=jnp.zeros((ROWS, VOCAB), jnp.bool_),
    )
    tokens, logprobs = draw_with_logprobs(logits, make_rows(params, constrained=[True] * ROWS), state)
    for row in range(ROWS):
        expected = log_softmax(logits[row, :NUM_TOKEN_IDS])
        best = np.argsort(-expected)[:MAX_LOGPROBS]
        np.testing.assert_allclose(logprobs.chosen[row], expected[tokens[row]], atol=1e-5)
        np.testing.assert_array_equal(logprobs.top_ids[row], best)
        np.testing.assert_allclose(logprobs.top[row], expected[best], atol=1e-5)


def test_a_vocabulary_smaller_than_the_alternatives_is_filled_up() -> None:
    params = SamplingParams(temperature=0.0, logprobs=20)
    _, logprobs = draw_with_logprobs(np.array([[1.0, 3.0, 2.0]], np.float32), make_rows([params]))
    assert logprobs.top_ids.shape == logprobs.top.shape == (1, MAX_LOGPROBS)
    assert np.asarray(logprobs.top_ids)[0, :3].tolist() == [1, 2, 0]
    assert np.isneginf(np.asarray(logprobs.top)[0, 3:]).all()


def test_tokens_are_counted_in_their_slots() -> None:
    state = SamplerState.zeros(4, VOCAB)
    rows = make_rows([SamplingParams()] * 3, slots=[2, 0, 3])
    state = count_tokens(state, rows, jnp.array([7, 7, 9]))
    state = count_tokens(state, rows, jnp.array([7, 8, 9]))
    counts = np.asarray(state.output_counts)
    assert {(slot, token): counts[slot, token] for slot, token in zip(*counts.nonzero(), strict=True)} == {
        (2, 7): 2,
        (0, 7): 1,
        (0, 8): 1,
        (3, 9): 2,
    }
