"""What a picture of the scheduler shows: every page once, every step's rows, and a bounded outline of the tree."""

import numpy as np
import pytest
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, drain, tiny_config

from jaxserve.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.prefix_cache import PrefixCache, root_key
from jaxserve.scheduling.step_history import MAX_LANES, MAX_STEPS, TurnKind
from jaxserve.scheduling.tree_outline import MAX_CHILDREN, MAX_LINES, MAX_NODES, TreeLine, outline
from jaxserve.simulation.null_runner import NullRunner

ROOT = root_key(model="m")
SIZE = 2


def null_engine(**options: int) -> Engine:
    chosen = TinyOptions(**options)
    runner = NullRunner(choose=lambda request, position: 7, block_q=chosen.block_q)
    return Engine(
        tiny_config(chosen),
        TINY_MODEL,
        runner,  # type: ignore[arg-type]
        num_token_ids=NUM_TOKEN_IDS,
        eos_token_ids=frozenset({EOS}),
    )


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(3, NUM_TOKEN_IDS, length)]


def test_a_picture_counts_the_pages_that_the_engine_counts() -> None:
    engine, rng = null_engine(num_pages=40), np.random.default_rng(0)
    beginning = prompt(rng, 24)  # three pages
    for number in range(12):
        tokens = beginning + prompt(rng, 5) if number % 2 else prompt(rng, 20)
        engine.add(f"r{number}", tokens, SamplingParams(max_tokens=30))
    while engine.has_work():
        engine.step()
        picture, stats = engine.picture(), engine.stats()
        held = [page for request in picture.running for page in request.pages]
        assert len(set(held)) == stats.pages_active
        assert len(set(picture.kept_pages) - set(held)) == stats.pages_cached
        assert sum(held.count(page) > 1 for page in set(held)) == stats.pages_shared
        assert len(picture.running) == stats.num_running
        assert len(picture.waiting) == stats.num_waiting
        assert picture.num_pages == stats.pages_total == 39
    assert not engine.picture().running


def test_lanes_show_each_chunk_each_decode_and_each_preemption() -> None:
    engine, rng = null_engine(num_pages=9, prefix_caching=False), np.random.default_rng(1)
    engine.picture()
    for name in ("a", "b", "c"):
        engine.add(name, prompt(rng, 20), SamplingParams(max_tokens=40, ignore_eos=True))
    drain(engine)
    turns = [turn for record in engine.picture().steps for turn in record.turns]
    assert engine.stats().preemptions_total > 0
    preempted = [turn for turn in turns if turn.kind is TurnKind.PREEMPTED]
    assert len(preempted) == engine.stats().preemptions_total
    # What a slot's lane shows begins with a prompt and ends where the request left it.
    for slot in {turn.slot for turn in turns}:
        last = None
        for turn in (turn for turn in turns if turn.slot == slot):
            if turn.kind is TurnKind.DECODE:
                assert last is not None
                assert last.number == turn.number
            last = None if turn.kind is TurnKind.PREEMPTED else turn
    computed = sum(turn.tokens for turn in turns)
    assert computed == engine.stats().step_tokens_total


def test_steps_are_kept_only_from_the_first_picture_to_the_last() -> None:
    engine = null_engine()
    engine.add("before", [3, 4, 5], SamplingParams(max_tokens=4))
    drain(engine)
    assert engine.picture().steps == ()
    engine.add("watched", [3, 4, 5], SamplingParams(max_tokens=4))
    drain(engine)
    steps = engine.picture().steps
    assert [record.step for record in steps] == list(range(len(steps)))
    assert {turn.number for record in steps for turn in record.turns} == {1}
    engine.end_pictures()
    engine.add("after", [3, 4, 5], SamplingParams(max_tokens=4))
    drain(engine)
    assert engine.picture().steps == ()


def test_what_is_kept_of_the_steps_is_bounded() -> None:
    engine = null_engine()
    engine.picture()
    for number in range(3):
        engine.add(str(number), [3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True))
        drain(engine)
    steps = engine.picture().steps
    assert len(steps) == MAX_STEPS
    assert steps[-1].step - steps[0].step == MAX_STEPS - 1
    assert all(turn.slot < MAX_LANES for record in steps for turn in record.turns)


def grow(cache: PrefixCache, tokens: list[int], salt: str | None = None, *, stays: bool = False) -> None:
    root = root_key(model="m", salt=salt)
    prefix, pages = cache.open(root, cache.match(root, tokens))
    pages += cache.allocate(len(tokens) // SIZE - len(pages))
    cache.insert(prefix, tokens, pages, len(tokens) // SIZE)
    if not stays:
        cache.release(pages)


def lines(cache: PrefixCache) -> tuple[TreeLine, ...]:
    return outline(cache.roots(), cache.pool.num_holders)


def test_the_outline_forks_where_prompts_part_and_where_holders_change() -> None:
    cache = PrefixCache(PagePool(100), page_size=SIZE)
    grow(cache, [1, 1, 2, 2, 3, 3, 9])
    grow(cache, [1, 1, 2, 2, 4, 4, 9])
    grow(cache, [5, 5, 6, 6, 9], "secret", stays=True)
    grow(cache, [5, 5, 6, 6, 7, 7, 9], "secret", stays=True)
    assert lines(cache) == (
        TreeLine(depth=0, pages=2, holders=2, hidden=0, is_private=True, is_on_host=False),
        TreeLine(depth=1, pages=1, holders=1, hidden=0, is_private=True, is_on_host=False),
        TreeLine(depth=0, pages=2, holders=0, hidden=0, is_private=False, is_on_host=False),
        TreeLine(depth=1, pages=1, holders=0, hidden=0, is_private=False, is_on_host=False),
        TreeLine(depth=1, pages=1, holders=0, hidden=0, is_private=False, is_on_host=False),
    )


def test_the_outline_tells_what_went_to_host_memory() -> None:
    cache = PrefixCache(PagePool(5), page_size=SIZE, host_pages=4)
    grow(cache, [1, 1, 2, 2, 3, 3, 9])
    cache.release(cache.allocate(2))  # room for one page more than was free: the last of the prefix goes
    assert lines(cache) == (
        TreeLine(depth=0, pages=2, holders=0, hidden=0, is_private=False, is_on_host=False),
        TreeLine(depth=1, pages=1, holders=0, hidden=0, is_private=False, is_on_host=True),
    )


@pytest.mark.parametrize("shape", ["wide", "long", "private"])
def test_the_outline_is_bounded_whatever_the_tree(shape: str) -> None:
    cache = PrefixCache(PagePool(10_000), page_size=SIZE)
    if shape == "wide":
        for number in range(2000):
            grow(cache, [1, 1, number + 5, 1, 9])
    elif shape == "long":
        grow(cache, [token for token in range(5, 8005) for _ in range(SIZE)])
    else:
        for number in range(2000):
            grow(cache, [1, 1, 9], f"salt {number}")
    found = lines(cache)
    assert 0 < len(found) <= MAX_LINES
    assert sum(line.pages for line in found) <= MAX_NODES
    if shape == "wide":
        assert found[0].hidden == 2000 - MAX_CHILDREN
