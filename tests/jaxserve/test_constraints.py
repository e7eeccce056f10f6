"""What a request may not sample next."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import reference_bias

from jaxserve.constraints import TokenConstraints
from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams

VOCAB = 20
NUM_TOKEN_IDS = 18
END = frozenset({2, 3})


def constraints(params: SamplingParams) -> TokenConstraints:
    made = TokenConstraints.of(params, END, VOCAB, NUM_TOKEN_IDS)
    assert made is not None
    return made


def forbidden(params: SamplingParams, token_ids: list[int], num_output: int) -> set[int]:
    """Among the ids that the tokenizer has."""
    of_request = constraints(params)
    row = of_request.row(of_request.key(token_ids, num_output))
    return set(np.flatnonzero(np.isneginf(row[:NUM_TOKEN_IDS])).tolist())


def test_a_request_without_constraints_has_none() -> None:
    params = SamplingParams(temperature=0.3, top_k=4, stop_token_ids=(4,), repetition_penalty=1.2, seed=1)
    assert TokenConstraints.of(params, END, VOCAB, NUM_TOKEN_IDS) is None


def test_bias_is_added_as_it_is() -> None:
    of_request = constraints(SamplingParams(logit_bias={5: 1.5, 6: -100.0}))
    row = of_request.row(of_request.key([1], 0))
    assert row.dtype == np.float32
    assert row[5] == 1.5
    assert row[6] == -100.0
    assert np.count_nonzero(row[:NUM_TOKEN_IDS]) == 2


def test_padding_ids_are_forbidden_in_every_row() -> None:
    for params in (
        SamplingParams(min_tokens=1),
        SamplingParams(logit_bias={1: 1.0}),
        SamplingParams(bad_word_ids=((1, 2),)),
    ):
        of_request = constraints(params)
        for key in (of_request.key([1], 0), of_request.key([1], 5)):
            assert np.isneginf(of_request.row(key)[NUM_TOKEN_IDS:]).all()


def test_only_allowed_tokens_remain_and_bias_acts_among_them() -> None:
    params = SamplingParams(allowed_token_ids=(4, 5), logit_bias={5: 2.0, 6: 100.0})
    assert forbidden(params, [1], 0) == set(range(NUM_TOKEN_IDS)) - {4, 5}
    of_request = constraints(params)
    assert of_request.row(of_request.key([1], 0))[[4, 5]].tolist() == [0.0, 2.0]


def test_no_end_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=3)
    assert [forbidden(params, [7], n) for n in range(5)] == [set(END)] * 3 + [set(), set()]


def test_a_bad_word_of_one_token_is_always_forbidden() -> None:
    assert forbidden(SamplingParams(bad_word_ids=((9,),)), [1], 0) == {9}


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [([1], set()), ([7], set()), ([8], {10}), ([7, 8], {9, 10}), ([7, 8, 9], set()), ([7, 8, 4], set())],
)
def test_a_bad_words_last_token_is_forbidden_where_it_would_complete_it(
    token_ids: list[int], expected: set[int]
) -> None:
    assert forbidden(SamplingParams(bad_word_ids=((7, 8, 9), (8, 10))), token_ids, 0) == expected


def test_only_bad_words_of_several_tokens_need_every_token() -> None:
    assert constraints(SamplingParams(bad_word_ids=((7, 8),))).needs_every_token
    assert not constraints(SamplingParams(bad_word_ids=((7,),), min_tokens=3, logit_bias={1: 1})).needs_every_token


def test_the_key_changes_only_when_the_row_does() -> None:
    of_request = constraints(SamplingParams(bad_word_ids=((7, 8),), min_tokens=1))
    keys = [of_request.key(ids, n) for n, ids in enumerate([[1], [1, 5], [1, 5, 7], [1, 5, 7, 6], [1, 5, 7, 6, 6]])]
    assert keys[1] == keys[3] == keys[4]
    assert len({keys[0], keys[1], keys[2]}) == 3


def test_where_all_is_forbidden_for_now_the_requests_own_allowed_tokens_win() -> None:
    assert forbidden(SamplingParams(allowed_token_ids=(2,), min_tokens=4), [1], 0) == set(range(NUM_TOKEN_IDS)) - {2}
    only_completing = SamplingParams(allowed_token_ids=(8,), bad_word_ids=((7, 8),))
    assert forbidden(only_completing, [7], 0) == set(range(NUM_TOKEN_IDS)) - {8}


def test_forbidding_every_token_for_good_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="forbids every token") as error:
        constraints(SamplingParams(allowed_token_ids=(4, 5), bad_word_ids=((4,), (5,))))
    assert error.value.param == "bad_words"


token = st.integers(0, NUM_TOKEN_IDS - 1)
few_tokens = st.lists(st.integers(4, 7), max_size=6)  # few ids, so that bad words are often begun


@given(
    bias=st.dictionaries(token, st.floats(-100, 100, width=32), max_size=4),
    allowed=st.none() | st.lists(token, min_size=1, max_size=6).map(tuple),
    words=st.lists(few_tokens.filter(bool).map(tuple), max_size=4).map(tuple),
    min_tokens=st.integers(0, 3),
    prompt=few_tokens.filter(bool),
    output=few_tokens,
)
def test_rows_are_those_of_the_definition(
    bias: dict[int, float],
    allowed: tuple[int, ...] | None,
    words: tuple[tuple[int, ...], ...],
    min_tokens: int,
    prompt: list[int],
    output: list[int],
) -> None:
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed, bad_word_ids=words, min_tokens=min_tokens)
    expected = reference_bias(params, prompt=prompt, output=output, end_token_ids=END, vocab_size=VOCAB)
    try:
        made = TokenConstraints.of(params, END, VOCAB, NUM_TOKEN_IDS)
    except InvalidRequestError:
        assert np.isneginf(expected[:NUM_TOKEN_IDS]).all()
        return
    if made is None:
        assert not expected.any()
    elif not np.isneginf(expected[:NUM_TOKEN_IDS]).all():
        row = made.row(made.key([*prompt, *output], len(output)))
        np.testing.assert_allclose(row[:NUM_TOKEN_IDS], expected[:NUM_TOKEN_IDS], rtol=1e-6)
