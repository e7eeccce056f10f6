"""Sampling parameters refuse what lies outside their ranges, and name the field."""

import math
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_CHARS,
    SamplingParams,
)

NAN, INF = math.nan, math.inf

RANGES: dict[str, tuple[list[Any], list[Any]]] = {  # accepted, refused
    "n": ([1, MAX_N], [0, -1, MAX_N + 1]),
    "max_tokens": ([None, 1, 2**31 - 1], [0, -1, 2**31]),
    "min_tokens": ([0, 2**31 - 1], [-1, 2**31]),
    "temperature": ([0.0, 100.0], [-0.01, 100.1, NAN, INF, -INF]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31]),
    "top_p": ([1e-9, 1.0], [0.0, -0.1, 1.01, NAN, INF]),
    "min_p": ([0.0, 1.0], [-0.1, 1.01, NAN, INF]),
    "repetition_penalty": ([0.01, 100.0], [0.0, -1.0, 101.0, NAN, INF]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN, INF]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN, -INF]),
    "logit_bias": ([{}, {5: -100.0, 6: 100.0}], [{5: 100.1}, {5: -101.0}, {5: NAN}, {5: INF}]),
    "allowed_token_ids": ([None, (1,)], [()]),
    "seed": ([None, 0, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
    "stop": (
        [(), ("a",) * MAX_STOP, ("a" * (MAX_STOP_CHARS - 1), "b")],
        [("a",) * (MAX_STOP + 1), ("",), ("a" * MAX_STOP_CHARS, "b")],
    ),
    "bad_words": (
        [(), ("a",) * MAX_BAD_WORDS, ("a" * MAX_BAD_WORD_CHARS,)],
        [("",), ("a", ""), ("a",) * (MAX_BAD_WORDS + 1), ("a" * MAX_BAD_WORD_CHARS, "b")],
    ),
    "bad_word_ids": ([((1, 2),) * (2 * MAX_BAD_WORDS)], [((1, 2),) * (2 * MAX_BAD_WORDS + 1)]),
    "logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    "prompt_logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _) in RANGES.items() for value in good])
def test_values_within_their_range_are_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in RANGES.items() for value in bad])
def test_values_outside_their_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert name in error.value.message


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(InvalidRequestError, match="min_tokens is 6; it may not exceed max_tokens, 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_an_empty_bad_word_sequence_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        SamplingParams(bad_word_ids=((1,), ()))


@pytest.mark.parametrize(
    ("changes", "uses"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_only_penalties_that_change_something_count(changes: dict[str, float], uses: bool) -> None:
    assert SamplingParams(**changes).uses_penalties is uses
