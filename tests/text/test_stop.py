"""Stop strings match as a search over the whole text would, hold back exactly what they must, and stay linear."""

import itertools
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.text.stop import StopStrings

letters = st.text(alphabet="ab😀", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab😀", min_size=1, max_size=6), max_size=5)


def first_match(text: str, stops: list[str], allowed_from: int = 0) -> tuple[str, str] | None:
    """The text before the match and the match, by trying every end; the longest of several with one end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and end > allowed_from:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


def held_back(text: str, stops: list[str]) -> int:
    beginnings = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(beginnings, default=0)


def run(watcher: StopStrings, text: str, cuts: list[int]) -> tuple[str, str | None]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    shown = ""
    for start, end in itertools.pairwise(edges):
        delta, match = watcher.push(text[start:end])
        shown += delta
        if match is not None:
            return shown, match
    return shown + watcher.finish(), None


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 99)), include=st.booleans())
def test_match_equals_a_search_whatever_the_chunking(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    shown, match = run(StopStrings(stops, include=include), text, cuts)
    expected = first_match(text, stops)
    if expected is None:
        assert (shown, match) == (text, None)
    else:
        before, stop = expected
        assert (shown, match) == (before + stop if include else before, stop)


@given(text=letters, stops=stop_lists)
def test_text_is_held_exactly_while_it_could_still_match(text: str, stops: list[str]) -> None:
    watcher, shown = StopStrings(stops, include=False), ""
    for count, char in enumerate(text, start=1):
        delta, match = watcher.push(char)
        if match is not None:
            return
        shown += delta
        assert shown == text[: count - held_back(text[:count], stops)]


@given(text=letters, stops=stop_lists)
def test_nothing_is_held_where_the_stop_string_is_shown_anyway(text: str, stops: list[str]) -> None:
    watcher, shown = StopStrings(stops, include=True), ""
    for count, char in enumerate(text, start=1):
        delta, match = watcher.push(char)
        shown += delta
        assert shown == text[:count]
        if match is not None:
            return
    assert watcher.finish() == ""


@given(text=letters, stops=stop_lists, start=st.integers(0, 30))
def test_stop_that_ends_too_early_passes_and_a_later_one_counts(text: str, stops: list[str], start: int) -> None:
    start = min(start, len(text))
    watcher = StopStrings(stops, include=True)
    assert watcher.push(text[:start], may_stop=False) == (text[:start], None)
    shown, match = watcher.push(text[start:])
    expected = first_match(text, stops, allowed_from=start)
    if expected is None:
        assert (shown, match) == (text[start:], None)
    else:
        before, stop = expected
        assert (shown, match) == ((before + stop)[start:], stop)


def test_the_longest_of_the_stops_that_end_together_wins() -> None:
    assert StopStrings(["b", "ab"], include=False).push("xab") == ("x", "ab")
    assert StopStrings(["bc", "abcd"], include=False).push("abcd") == ("a", "bc")  # complete first


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_adversarial_text_stays_linear(include: bool, chunk: int) -> None:
    stops = ["a" * 5000 + "b", "a" * 2500 + "c", "aab" * 1000]
    watcher = StopStrings(stops, include=include)
    text = "a" * 200_000
    started = time.process_time()
    shown = 0
    for start in range(0, len(text), chunk):
        delta, match = watcher.push(text[start : start + chunk])
        shown += len(delta)
        assert match is None
    assert time.process_time() - started < 3.0  # about 0.1 s; 5000 times as much if each character were searched
    assert shown + len(watcher.finish()) == len(text)
    assert include or shown == len(text) - 5000


def test_a_thousand_choices_with_long_stop_strings_share_what_finds_them() -> None:
    tracemalloc.start()
    try:
        watchers = [StopStrings(["a" * 1000, "b" * 1000], include=False) for _ in range(1000)]
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert size < 2**21  # 2000 nodes; for each of them anew it would be half a gigabyte
    assert watchers[0].push("aaa") == ("", None)
    assert watchers[1].push("ab") == ("a", None)
    assert watchers[0].push("c") == ("aaac", None)


def test_a_push_after_finish_begins_anew() -> None:
    watcher = StopStrings(["ab"], include=False)
    assert watcher.push("xa") == ("x", None)
    assert watcher.finish() == "a"
    assert watcher.push("b") == ("b", None)
