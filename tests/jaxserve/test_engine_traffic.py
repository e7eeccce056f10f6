"""Random traffic through the engine: pages always add up, every accepted request ends exactly once."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from random_requests import random_request
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, tiny_config

from jaxserve.compilations import COMPILATIONS
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.simulation.null_runner import NullRunner

pytestmark = pytest.mark.slow

MakeRequest = Callable[[np.random.Generator], tuple[Sequence[int], SamplingParams]]


class Traffic:
    """Clients that come, err, and go away; and the books on what each was told."""

    def __init__(self, engine: Engine, make_request: MakeRequest, seed: int) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.accepted: dict[str, tuple[int, SamplingParams]] = {}  # prompt length, parameters
        self.running: list[str] = []
        self.tokens: Counter[str] = Counter()
        self.finals: dict[str, RequestOutput] = {}
        self.num_refused = 0
        self._make_request = make_request

    def run(self, num_requests: int) -> None:
        most_at_once = 3 * self.engine.config.scheduler.max_num_seqs
        while len(self.accepted) < num_requests or self.engine.has_work():
            for _ in range(min(self.rng.poisson(8), num_requests - len(self.accepted))):
                if len(self.running) < most_at_once:
                    self.add()
            if self.rng.random() < 0.1:
                self.add_what_must_be_refused()
            if self.running and self.rng.random() < 0.2:
                self.abort()
            self.step()

    def add(self) -> None:
        request_id = f"request {len(self.accepted)}"
        prompt, params = self._make_request(self.rng)
        self.engine.add(request_id, prompt, params)
        self.accepted[request_id] = (len(prompt), params)
        self.running.append(request_id)

    def add_what_must_be_refused(self) -> None:
        request_id, prompt, params = BAD_REQUESTS[self.rng.integers(len(BAD_REQUESTS))]
        if request_id == "taken":
            if not self.running:
                return
            request_id = self.running[self.rng.integers(len(self.running))]
        before = self.engine.stats()
        with pytest.raises(InvalidRequestError):
            self.engine.add(request_id, prompt, params)
        assert self.engine.stats() == before, "a refused request left something behind"
        self.num_refused += 1

    def abort(self) -> None:
        request_id = self.running[self.rng.integers(len(self.running))]
        self.engine.abort(request_id)
        self.engine.abort(request_id)  # the second, an unknown and a finished one change nothing
        self.engine.abort("never seen")
        if self.finals:
            self.engine.abort(next(reversed(self.finals)))

    def step(self) -> None:
        for output in self.engine.step():
            assert output.request_id not in self.finals, f"{output.request_id} spoke after its end"
            self.tokens[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                self.finals[output.request_id] = output
                self.running.remove(output.request_id)
        stats = self.engine.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_active == stats.pages_total
        self.engine.check_integrity()

    def check_the_end(self) -> None:
        assert self.finals.keys() == self.accepted.keys()
        for request_id, (prompt_len, params) in self.accepted.items():
            final, num_tokens = self.finals[request_id], self.tokens[request_id]
            limit = self.engine.max_model_len - prompt_len if params.max_tokens is None else params.max_tokens
            assert num_tokens <= limit
            if final.finish_reason == "length":
                assert num_tokens == limit
            elif final.finish_reason == "stop":
                assert final.stop_token_id == final.token_ids[-1]
        reasons = Counter(final.finish_reason for final in self.finals.values())
        assert all(reasons[reason] > 0 for reason in ("stop", "length", "abort")), reasons
        stats = self.engine.stats()
        assert stats.pages_active == 0
        assert stats.num_running == stats.num_waiting == 0
        assert stats.preemptions_total >= 10
        assert stats.output_tokens_total == self.tokens.total()
        assert self.num_refused > 0


BAD_REQUESTS: tuple[tuple[str, list[int], SamplingParams], ...] = (
    ("bad", [], SamplingParams()),
    ("bad", [1, NUM_TOKEN_IDS], SamplingParams()),
    ("bad", [-1], SamplingParams()),
    ("bad", [1] * TINY_MODEL.max_position, SamplingParams()),
    ("bad", [1], SamplingParams(max_tokens=2**31 - 1)),
    ("bad", [1], SamplingParams(min_tokens=2**31 - 1)),
    ("bad", [1], SamplingParams(logit_bias={NUM_TOKEN_IDS: 1.0})),
    ("bad", [1], SamplingParams(stop_token_ids=(-1,))),
    ("bad", [1], SamplingParams(allowed_token_ids=(10**9,))),
    ("bad", [1], SamplingParams(allowed_token_ids=(5,), bad_word_ids=((5,),))),
    ("taken", [1], SamplingParams()),
)


def short_request(rng: np.random.Generator) -> tuple[list[int], SamplingParams]:
    """Cheap for the host; the null runner has no use for most parameters."""
    length = int(rng.integers(1, 130)) if rng.random() < 0.1 else int(rng.integers(1, 20))
    max_tokens = int(rng.integers(1, 60)) if rng.random() < 0.2 else int(rng.integers(1, 10))
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=1,
        logprobs=1 if rng.random() < 0.1 else None,
        prompt_logprobs=0 if rng.random() < 0.05 else None,
        bad_word_ids=((1, 2),) if rng.random() < 0.1 else (),
    )
    return [3] * length, params


def test_20000_requests_on_a_null_runner() -> None:
    options = TinyOptions(max_num_seqs=32, num_pages=40, max_num_batched_tokens=32 + 64, decode_buckets=(32,))
    tokens = np.random.default_rng(1)
    runner = NullRunner(choose=lambda request, position: int(tokens.integers(NUM_TOKEN_IDS)), block_q=options.block_q)
    engine = Engine(
        tiny_config(options), TINY_MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset({EOS})
    )
    compilations = COMPILATIONS.total
    traffic = Traffic(engine, short_request, seed=2)
    traffic.run(20_000)
    traffic.check_the_end()
    assert len(traffic.finals) == 20_000
    assert COMPILATIONS.total == compilations


def mixed_request(rng: np.random.Generator) -> tuple[Sequence[int], SamplingParams]:
    request = random_request(rng)
    return request.prompt, request.params


def test_500_requests_on_a_tiny_model(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine(num_pages=1 + 24)
    compilations = COMPILATIONS.total
    traffic = Traffic(engine, mixed_request, seed=3)
    traffic.run(500)
    traffic.check_the_end()
    assert len(traffic.finals) == 500
    assert COMPILATIONS.total == compilations
