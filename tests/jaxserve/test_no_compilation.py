"""Once ready, no request whatever makes anything compile."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from random_requests import EDGES
from tiny_engine import EOS, drain, tiny_params, tokens_of

from jaxserve.compilations import COMPILATIONS, CompilationCounter
from jaxserve.device.sharding import tensor_mesh
from jaxserve.engine import EMBEDDING_PARAMS, Engine
from jaxserve.errors import EngineDeadError
from jaxserve.pooling import Pooling
from jaxserve.request import MAX_LOGPROBS, SamplingParams

TinyEngine = Callable[..., Engine]

SWEEP = (
    SamplingParams(max_tokens=4),
    SamplingParams(max_tokens=4, temperature=0.0),
    SamplingParams(max_tokens=4, seed=1),
    SamplingParams(max_tokens=4, seed=-(2**63)),
    SamplingParams(max_tokens=4, seed=2**63 - 1),
    SamplingParams(max_tokens=4, top_k=3),
    SamplingParams(max_tokens=4, top_p=0.5),
    SamplingParams(max_tokens=4, min_p=0.5),
    SamplingParams(max_tokens=4, repetition_penalty=1.2),
    SamplingParams(max_tokens=4, presence_penalty=1.0),
    SamplingParams(max_tokens=4, frequency_penalty=-1.0),
    SamplingParams(max_tokens=4, logit_bias={7: 3.0}),
    SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(range(100), -1.0)),
    SamplingParams(max_tokens=4, allowed_token_ids=(5, 6, 7)),
    SamplingParams(max_tokens=4, allowed_token_ids=tuple(range(3, 140))),
    SamplingParams(max_tokens=4, bad_word_ids=((5,), (6, 7), (8, 9, 10))),
    SamplingParams(max_tokens=4, min_tokens=3),
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, stop_token_ids=(EOS, 5)),
    *(SamplingParams(max_tokens=4, logprobs=count) for count in range(MAX_LOGPROBS + 1)),
    *(SamplingParams(max_tokens=4, prompt_logprobs=count) for count in range(MAX_LOGPROBS + 1)),
    SamplingParams(max_tokens=4, cache_salt="mine", tenant="a", priority=3),
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


def test_several_completions_of_one_prompt_compile_nothing(engine: Engine) -> None:
    for n in (2, 3, 9):
        for choice, params in enumerate(SamplingParams(n=n, max_tokens=3, seed=1, logprobs=2).choices()):
            engine.add(f"{n}-{choice}", [3, 4, 5] * 9, params)
        drain(engine)


def test_cache_hits_and_flushes_compile_nothing(engine: Engine) -> None:
    for turn in range(3):
        for i in range(4):
            engine.add(f"{turn}-{i}", [9] * 40 + [3 + i], SamplingParams(max_tokens=3, logit_bias={5: 1.0}))
        drain(engine)
        assert engine.stats().pages_cached > 0
        if turn:
            assert engine.flush_cache() > 0
            assert engine.stats().pages_cached == 0


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_compile_nothing_alone_or_beside_others(engine: Engine, pooling: Pooling) -> None:
    for length in (1, 16, 70):
        engine.add(f"embed {length}", [6] * length, EMBEDDING_PARAMS, pooling=pooling)
        drain(engine)
        engine.add(f"beside {length}", [6] * length, EMBEDDING_PARAMS, pooling=pooling)
        engine.add(f"tokens {length}", [7] * length, SamplingParams(max_tokens=3, prompt_logprobs=1))
        drain(engine)


def test_weights_that_were_restored_or_moved_compile_nothing(tiny_engine: TinyEngine) -> None:
    """Programs are called, never traced, so only what an array is counts, not where it came from; what does not fit is
    an error before anything runs."""
    mesh = tensor_mesh(1, jax.devices())
    moves: tuple[Callable[[jax.Array], Any], ...] = (
        lambda x: x,
        lambda x: jax.device_put(np.asarray(x)),  # committed to no device
        lambda x: jax.device_put(np.asarray(x), SingleDeviceSharding(jax.devices()[0])),
        lambda x: jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec())),
    )
    answers = []
    for move in moves:
        engine = tiny_engine(params=jax.tree.map(move, tiny_params()))
        compilations = COMPILATIONS.total
        for i, params in enumerate(SWEEP[:12]):
            engine.add(str(i), [3 + i] * (5 * i + 1), replace(params, seed=i))
        outputs = drain(engine)
        assert COMPILATIONS.total == compilations
        answers.append({name: tokens_of(of_one) for name, of_one in outputs.items()})
    assert all(answer == answers[0] for answer in answers)


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
