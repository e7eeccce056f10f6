"""On the device: pages that went to host memory and came back give the tokens and logprobs that no cache gives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_engine import NUM_TOKEN_IDS, collect, drain, tokens_of

from jaxserve.compilations import COMPILATIONS
from jaxserve.engine import Engine
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.scheduling.plan import Plan

TOLERANCE = 1e-4
PAGE = 8
CHATS = 6
TURNS = 3
# A chat comes to about 15 pages: two fit the device at once, the others' are on the host meanwhile.
NUM_PAGES = 1 + 34


def messages() -> list[list[list[int]]]:
    rng = np.random.default_rng(12)
    lengths = [[int(rng.choice([7, 8, 9, 16, 23, 31, 40])) for _ in range(TURNS)] for _ in range(CHATS)]
    return [[rng.integers(3, NUM_TOKEN_IDS, count).tolist() for count in chat] for chat in lengths]


def chat_through(engine: Engine, *, flush: bool = False, abort: bool = False) -> dict[str, list[RequestOutput]]:
    """All chats, a turn of each at once; every turn's prompt is the whole conversation before it."""
    before: list[list[int]] = [[] for _ in range(CHATS)]
    results: dict[str, list[RequestOutput]] = {}
    for turn in range(TURNS):
        for chat, several in enumerate(messages()):
            before[chat] += several[turn]
            options: dict[str, Any] = {"max_tokens": 12, "seed": chat, "logprobs": 2, "ignore_eos": True}
            options |= {"temperature": 0.8} if chat % 2 else {"temperature": 0.0, "repetition_penalty": 1.2}
            engine.add(f"{chat}/{turn}", before[chat], SamplingParams(**options))
            if abort:
                engine.add(f"{chat}/{turn}/left", before[chat], SamplingParams(max_tokens=5))
        outputs: dict[str, list[RequestOutput]] = {}
        for step in range(4):
            collect(outputs, engine.step())
            engine.check_integrity()
            if abort:
                for chat in range(step, CHATS, 2):
                    engine.abort(f"{chat}/{turn}/left")
        if flush:
            engine.flush_cache()
            assert engine.stats().host_pages_held == 0
        for name, more in drain(engine).items():
            collect(outputs, more)
            assert outputs[name]
        engine.check_integrity()
        for chat in range(CHATS):
            before[chat] = before[chat] + tokens_of(outputs[f"{chat}/{turn}"])
        results |= {name: outputs[name] for name in outputs if not name.endswith("left")}
    return results


def assert_same(mine: dict[str, list[RequestOutput]], other: dict[str, list[RequestOutput]]) -> None:
    assert mine.keys() == other.keys()
    for name, outputs in other.items():
        assert tokens_of(mine[name]) == tokens_of(outputs), name
        for a, b in zip(mine[name], outputs, strict=True):
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert abs(x.logprob - y.logprob) < TOLERANCE


@pytest.fixture(scope="module")
def uncached(tiny_engine: Callable[..., Engine]) -> dict[str, list[RequestOutput]]:
    return chat_through(tiny_engine(prefix_caching=False))


@pytest.mark.parametrize(("host_pages", "most_moved"), [(2, 128), (20, 128), (200, 1)])
def test_chats_that_do_not_fit_the_device_leave_no_trace_of_it(
    tiny_engine: Callable[..., Engine],
    uncached: dict[str, list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
    host_pages: int,
    most_moved: int,
) -> None:
    engine = tiny_engine(num_pages=NUM_PAGES, host_pages=host_pages)
    engine._scheduler._max_restored_pages = engine._scheduler._max_saved_pages = most_moved
    moved: list[tuple[int, int]] = []  # to the host and back, beside others that decode

    def dispatch(plan: Plan, dispatch: Callable[[Plan], Any] = engine.runner.dispatch) -> Any:
        if plan.copies is not None and plan.decodes:
            moved.append((len(plan.copies.saved), len(plan.copies.restored)))
        return dispatch(plan)

    monkeypatch.setattr(engine.runner, "dispatch", dispatch)
    compiled = COMPILATIONS.total
    assert_same(chat_through(engine), uncached)
    stats = engine.stats()
    assert stats.host_pages_saved_total > min(host_pages, 40)
    assert stats.host_pages_held <= stats.host_pages_total == host_pages
    assert COMPILATIONS.total == compiled, "copies are compiled before ready"
    assert moved
    assert all(max(both_ways) <= most_moved for both_ways in moved)
    assert (stats.host_pages_unsaved_total > 0) == (most_moved == 1)
    if host_pages == 200:
        assert stats.host_pages_restored_total > 30
        assert 0 < stats.host_hits_total <= stats.host_pages_restored_total


def test_what_is_restored_counts_as_cached(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine(num_pages=NUM_PAGES, host_pages=200)
    outputs = chat_through(engine)
    for chat, several in enumerate(messages()):
        known = 0
        for turn in range(TURNS):
            prompt = known + len(several[turn])
            # The last token of an answer was never fed back; then full pages, and one token at least is computed.
            found = min(max(known - 1, 0), prompt - 1) // PAGE * PAGE
            assert outputs[f"{chat}/{turn}"][0].num_cached_tokens == found
            known = prompt + 12


@pytest.mark.parametrize("disturbance", [{"flush": True}, {"abort": True}])
def test_neither_flushes_nor_aborts_in_the_middle_of_copies_are_seen(
    tiny_engine: Callable[..., Engine], uncached: dict[str, list[RequestOutput]], disturbance: dict[str, bool]
) -> None:
    engine = tiny_engine(num_pages=NUM_PAGES, host_pages=30)
    assert_same(chat_through(engine, **disturbance), uncached)
    assert engine.stats().host_pages_saved_total > 0
