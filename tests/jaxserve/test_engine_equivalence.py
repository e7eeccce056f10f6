"""What a request gets depends on nothing but itself: every way to run it agrees with a float64 model and sampler."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from llama_reference import llama_logits
from random_requests import EDGES, MAX_LEN, RandomRequest, random_request
from sampling_reference import HostArray, log_softmax, noise, reference_bias, reference_scores
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, drain, tiny_weights, tokens_of

from jaxserve.device import runner
from jaxserve.device.buckets import StepShape, choose_shape, step_shapes
from jaxserve.engine import Engine
from jaxserve.request import RequestOutput, TokenLogprobs

pytestmark = pytest.mark.slow

NUM_REQUESTS = 200
TOLERANCE = 1e-4

TinyEngine = Callable[..., Engine]
Outputs = list[list[RequestOutput]]  # of each request


@functools.cache
def requests() -> tuple[RandomRequest, ...]:
    rng = np.random.default_rng(20)
    return tuple(random_request(rng) for _ in range(NUM_REQUESTS))


def run_together(engine: Engine) -> Outputs:
    for i, request in enumerate(requests()):
        engine.add(str(i), request.prompt, request.params)
    outputs = drain(engine)
    return [outputs[str(i)] for i in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def alone(tiny_engine: TinyEngine) -> Outputs:
    engine = tiny_engine()
    outputs = []
    for i, request in enumerate(requests()):
        engine.add(str(i), request.prompt, request.params)
        outputs.append(drain(engine)[str(i)])
    assert_all_pages_are_back(engine)
    return outputs


def assert_all_pages_are_back(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert stats.pages_active == 0
    assert stats.num_running == stats.num_waiting == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Of one request and the tokens it got: what the float64 model says at each of them.

    Attributes:
      scores: [outputs, vocab], which the output token maximises.
      logprobs: [prompt + outputs, vocab]; row i is the distribution of token i, row 0 means nothing.
    """

    scores: HostArray
    logprobs: HostArray


@functools.cache
def reference(index: int, output: tuple[int, ...]) -> Reference:
    request = requests()[index]
    params, prompt = request.params, request.prompt
    logits = llama_logits(tiny_weights(), TINY_MODEL, [*prompt, *output[:-1]])
    logits[:, NUM_TOKEN_IDS:] = -np.inf
    assert params.seed is not None
    draws = noise(params.seed, range(MAX_LEN), TINY_MODEL.vocab_size)
    scores = []
    for i in range(len(output)):
        bias = reference_bias(
            params,
            prompt=prompt,
            output=output[:i],
            end_token_ids=frozenset({EOS, *params.stop_token_ids}),
            vocab_size=TINY_MODEL.vocab_size,
        )
        position = len(prompt) + i
        row = reference_scores(
            logits[position - 1], params, prompt=prompt, output=output[:i], bias=bias, num_token_ids=NUM_TOKEN_IDS
        )
        scores.append(row if params.temperature == 0 else row + draws[position])
    nothing = np.zeros((1, TINY_MODEL.vocab_size))
    return Reference(
        scores=np.array(scores), logprobs=np.concatenate([nothing, *(log_softmax(row)[None] for row in logits)])
    )


def assert_agrees_with_the_reference(outputs: Outputs) -> int:
    """Returns how many tokens were not the best one, but within the tolerance of it."""
    near_ties = 0
    for index, (request, of_request) in enumerate(zip(requests(), outputs, strict=True)):
        tokens = tuple(tokens_of(of_request))
        expected = reference(index, tokens)
        best = expected.scores.max(-1)
        missed = best - expected.scores[range(len(tokens)), tokens]
        assert (missed * (request.params.temperature or 1.0) <= TOLERANCE).all(), (index, missed, request.params)
        near_ties += int((missed > 0).sum())
        assert_ends_as_it_should(request, of_request)
        assert_logprobs(request, of_request, expected)
    return near_ties


def assert_ends_as_it_should(request: RandomRequest, outputs: list[RequestOutput]) -> None:
    params, tokens = request.params, tokens_of(outputs)
    ends = {*params.stop_token_ids} if params.ignore_eos else {EOS, *params.stop_token_ids}
    limit = MAX_LEN - len(request.prompt) if params.max_tokens is None else params.max_tokens
    assert params.min_tokens <= len(tokens) <= limit
    assert not ends & {*tokens[:-1]}
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    if tokens[-1] in ends:
        assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", tokens[-1])
    else:
        assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("length", None)
        assert len(tokens) == limit


def assert_logprobs(request: RandomRequest, outputs: list[RequestOutput], expected: Reference) -> None:
    params, length = request.params, len(request.prompt)
    first, later = outputs[0], outputs[1:]
    assert all(output.prompt_logprobs is None for output in later)
    if params.prompt_logprobs is None:
        assert first.prompt_logprobs is None
    else:
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == length
        assert first.prompt_logprobs[0] is None
        for position in range(1, length):
            entry = first.prompt_logprobs[position]
            assert entry is not None
            assert entry.token_id == request.prompt[position]
            assert_entry(entry, params.prompt_logprobs, expected.logprobs[position])
    for i, output in enumerate(outputs):
        if params.logprobs is None:
            assert output.logprobs is None
        else:
            assert output.logprobs is not None
            (entry,) = output.logprobs
            assert (entry.token_id,) == output.token_ids
            assert_entry(entry, params.logprobs, expected.logprobs[length + i])


def assert_entry(entry: TokenLogprobs, count: int, expected: HostArray) -> None:
    assert abs(entry.logprob - expected[entry.token_id]) < TOLERANCE
    best = np.sort(expected)[::-1][:count]
    ids = [token for token, _ in entry.top]
    assert len(set(ids)) == len(ids) == count
    np.testing.assert_allclose([logprob for _, logprob in entry.top], best, atol=TOLERANCE)
    np.testing.assert_allclose(expected[ids], best, atol=TOLERANCE)


def assert_equal_runs(run: Outputs, alone: Outputs) -> int:
    """Returns how many requests got other tokens, each from a near tie on, which the reference has judged."""
    differing = 0
    for index, (of_run, of_alone) in enumerate(zip(run, alone, strict=True)):
        tokens, expected = tokens_of(of_run), tokens_of(of_alone)
        same = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:
            differing += 1
            scores = reference(index, tuple(expected)).scores[same]
            temperature = requests()[index].params.temperature or 1.0
            assert abs(scores[tokens[same]] - scores[expected[same]]) * temperature <= TOLERANCE, index
        else:
            assert tokens == expected
        for mine, other in zip(of_run[:same], of_alone[:same], strict=False):
            for a, b in zip(mine.logprobs or (), other.logprobs or (), strict=True):
                assert abs(a.logprob - b.logprob) < TOLERANCE
    return differing


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}")

    return write


def test_the_requests_use_every_parameter_and_cross_every_edge() -> None:
    params = [request.params for request in requests()]
    for name, off in {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_word_ids": (),
        "allowed_token_ids": None,
        "stop_token_ids": (),
        "min_tokens": 0,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
    }.items():
        assert sum(getattr(p, name) != off for p in params) >= 10, name
    assert any(p.max_tokens is None for p in params)
    lengths = {len(request.prompt) for request in requests()}
    assert lengths >= {*EDGES}


def test_each_request_alone_agrees_with_the_reference(alone: Outputs, report: Callable[[str], None]) -> None:
    near_ties = assert_agrees_with_the_reference(alone)
    total = sum(len(tokens_of(of_request)) for of_request in alone)
    report(f"alone: {total} tokens, {near_ties} of them within {TOLERANCE} of the best instead of the best")
    reasons = [of_request[-1].finish_reason for of_request in alone]
    assert min(reasons.count("stop"), reasons.count("length")) >= 20


WAYS = {
    "together": {},
    "odd_chunks": {
        "block_q": 7,
        "page_size": 5,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 7 + 3 * 7 + 4,
        "decode_buckets": (7,),
        "prefill_buckets": (3,),
    },
    "small_budget": {"max_num_batched_tokens": 24},
    "small_pool": {"num_pages": 1 + 24},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_logprobs_are_those_of_the_request_alone(
    way: str,
    tiny_engine: TinyEngine,
    alone: Outputs,
    report: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiny_engine(**WAYS[way])
    used = []

    def choose_and_note(shapes: tuple[StepShape, ...], decode_rows: int, prefill_blocks: int) -> StepShape:
        used.append(choose_shape(shapes, decode_rows, prefill_blocks))
        return used[-1]

    monkeypatch.setattr(runner, "choose_shape", choose_and_note)
    outputs = run_together(engine)
    execution = engine.config.execution
    if way != "small_budget":  # whose steps never fill the largest bucket of prompts
        assert set(used) == {*step_shapes(execution.decode_buckets, execution.prefill_buckets)}, "a program never ran"
    near_ties = assert_agrees_with_the_reference(outputs)
    differing = assert_equal_runs(outputs, alone)
    preemptions = engine.stats().preemptions_total
    report(f"{way}: {differing} requests differ from alone, {near_ties} near ties, {preemptions} preemptions")
    assert_all_pages_are_back(engine)
    if way == "small_pool":
        assert preemptions > 0
