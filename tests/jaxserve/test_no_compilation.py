"""Once ready, no request whatever makes anything compile."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from random_requests import EDGES
from tiny_engine import EOS, drain

from jaxserve.compilations import COMPILATIONS, CompilationCounter
from jaxserve.engine import Engine
from jaxserve.errors import EngineDeadError
from jaxserve.request import MAX_LOGPROBS, SamplingParams

TinyEngine = Callable[..., Engine]

SWEEP = (
    SamplingParams(max_tokens=4),
    SamplingParams(max_tokens=4, temperature=0.0),
    SamplingParams(max_tokens=4, seed=1),
    SamplingParams(max_tokens=4, seed=-(2**63)),
    SamplingParams(max_tokens=4, top_k=3),
    SamplingParams(max_tokens=4, top_p=0.5),
    SamplingParams(max_tokens=4, min_p=0.5),
    SamplingParams(max_tokens=4, repetition_penalty=1.2),
    SamplingParams(max_tokens=4, presence_penalty=1.0),
    SamplingParams(max_tokens=4, frequency_penalty=-1.0),
    SamplingParams(max_tokens=4, logit_bias={7: 3.0}),
    SamplingParams(max_tokens=4, allowed_token_ids=(5, 6, 7)),
    SamplingParams(max_tokens=4, bad_word_ids=((5,), (6, 7), (8, 9, 10))),
    SamplingParams(max_tokens=4, min_tokens=3),
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, stop_token_ids=(EOS, 5)),
    *(SamplingParams(max_tokens=4, logprobs=count) for count in (0, 1, 5, MAX_LOGPROBS)),
    *(SamplingParams(max_tokens=4, prompt_logprobs=count) for count in (0, 1, MAX_LOGPROBS)),
    SamplingParams(
        max_tokens=4,
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={9: 1.0},
        bad_word_ids=((3, 4),),
        seed=5,
        min_tokens=2,
        logprobs=3,
        prompt_logprobs=2,
    ),
)


@pytest.fixture
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    """Whatever a test does with it must compile nothing."""
    engine = tiny_engine(num_pages=1 + 24)
    compilations = COMPILATIONS.total
    yield engine
    assert COMPILATIONS.total == compilations


def test_no_parameter_compiles_anything_alone_or_with_the_others(engine: Engine) -> None:
    for i, params in enumerate(SWEEP):
        engine.add(str(i), [3, 4, 5], params)
        drain(engine)
    for i, params in enumerate(SWEEP):
        engine.add(str(i), [3 + i] * 20, params)
    assert len(drain(engine)) == len(SWEEP)


def test_no_prompt_length_and_no_number_of_requests_compiles_anything(engine: Engine) -> None:
    for length in EDGES:
        engine.add(str(length), [3] * length, SamplingParams(max_tokens=2))
        drain(engine)
    for count in range(1, 17):
        for i in range(count):
            engine.add(f"{count}-{i}", [4] * count, SamplingParams(max_tokens=3, seed=i))
        drain(engine)


def test_the_first_abort_compiles_nothing_wherever_it_meets_the_request(engine: Engine) -> None:
    for steps in range(5):
        for i in range(12):  # more than there are slots: some are still waiting
            engine.add(f"{steps}-{i}", [5] * 70, SamplingParams(max_tokens=30, logprobs=1, prompt_logprobs=1))
        for _ in range(steps):
            engine.step()
        for i in range(12):
            engine.abort(f"{steps}-{i}")
        drain(engine)


def test_the_first_preemption_compiles_nothing(engine: Engine) -> None:
    for i, params in enumerate(SWEEP[:8]):
        longer = SamplingParams(
            max_tokens=60,
            ignore_eos=True,
            repetition_penalty=params.repetition_penalty,
            logit_bias={5: 1.0},
            logprobs=1,
        )
        engine.add(str(i), [3] * 8, longer)
    drain(engine)
    assert engine.stats().preemptions_total > 0


def test_statistics_and_refusals_compile_nothing(engine: Engine) -> None:
    engine.stats()
    engine.check_integrity()
    engine.abort("unknown")
    with pytest.raises(Exception, match="prompt is empty"):
        engine.add("bad", [], SamplingParams())


def compile_something(size: int) -> None:
    """A program that no other test compiles."""
    jax.jit(lambda x: x * 3 + size)(jnp.zeros(size)).block_until_ready()


@pytest.fixture
def not_ready(monkeypatch: pytest.MonkeyPatch) -> CompilationCounter:
    """The process's one counter, as before `mark_ready`; put back afterwards."""
    monkeypatch.setattr(COMPILATIONS, "total_when_ready", None)
    return COMPILATIONS


def test_a_compilation_is_counted_once_ready(not_ready: CompilationCounter) -> None:
    counter = not_ready
    before = counter.total
    compile_something(1001)
    assert counter.total > before
    assert counter.after_ready == 0
    counter.mark_ready()
    assert counter.after_ready == 0
    before = counter.total
    compile_something(1002)
    assert counter.after_ready == counter.total - before > 0


def test_only_a_compilation_after_ready_is_logged(
    not_ready: CompilationCounter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="jaxserve.compilations"):
        compile_something(1003)
        assert not caplog.records
        not_ready.mark_ready()
        compile_something(1004)
    assert any("after ready" in record.message for record in caplog.records)


def test_strict_shapes_make_a_compilation_after_ready_an_error(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for strict in (False, True):
        engine = tiny_engine(strict_shapes=strict)
        monkeypatch.setattr(COMPILATIONS, "total_when_ready", COMPILATIONS.total)
        engine.add("a", [3], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.step()
        assert engine.stats().compilations_after_ready == 0
        compile_something(2000 + strict)
        assert engine.stats().compilations_after_ready > 0
        if strict:
            with pytest.raises(EngineDeadError, match="strict_shapes"):
                engine.step()
        else:
            drain(engine)
