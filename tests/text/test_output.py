"""Engine outputs become text deltas: one finish reason, stop strings, offsets, and no text of the end token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.text.output import TextDelta, TextOutput, resolve_bad_words
from jaxserve.text.tokenizer import Tokenizer


def outputs(
    ids: list[int], *, finish: str | None = None, stop_id: int | None = None, step: int = 1
) -> list[RequestOutput]:
    """What the engine sends: `step` tokens at a time, the last with the finish reason."""
    chunks = [tuple(ids[start : start + step]) for start in range(0, len(ids), step)] or [()]
    made = [RequestOutput(request_id="r", token_ids=chunk) for chunk in chunks]
    made[-1] = replace(made[-1], finish_reason=finish, stop_token_id=stop_id)
    return made


def run(tokenizer: Tokenizer, params: SamplingParams, engine: list[RequestOutput], **kwargs: bool) -> list[TextDelta]:
    text_output = TextOutput(tokenizer, (), params, **kwargs)
    return [text_output.push(output) for output in engine]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_length_shows_everything_the_broken_character_included(tiny: Tokenizer) -> None:
    ids = [*tiny.encode("the é")[:-1], 4 + 230]
    deltas = run(tiny, SamplingParams(), outputs(ids, finish="length"))
    assert text_of(deltas) == tiny.decode(ids)
    assert text_of(deltas).endswith("\ufffd")
    assert [delta.finish_reason for delta in deltas] == [None] * (len(ids) - 1) + ["length"]
    assert deltas[-1].num_output_tokens == len(ids)


@pytest.mark.parametrize(
    ("include", "skip", "text"), [(False, False, "the"), (True, False, "the<|end|>"), (True, True, "the")]
)
def test_end_of_sequence_is_shown_only_on_request(tiny: Tokenizer, include: bool, skip: bool, text: str) -> None:
    params = SamplingParams(include_stop_str_in_output=include)
    ids = [*tiny.encode("the"), 1]
    deltas = run(tiny, params, outputs(ids, finish="stop", stop_id=1), skip_special_tokens=skip)
    assert text_of(deltas) == text
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)  # the model's own end
    assert deltas[-1].token_ids == (1,)
    assert deltas[-1].num_output_tokens == len(ids)


def test_stop_token_is_the_stop_reason(tiny: Tokenizer) -> None:
    stop_id = tiny.encode("!")[0]
    params = SamplingParams(stop_token_ids=(stop_id,))
    deltas = run(tiny, params, outputs([*tiny.encode("the"), stop_id], finish="stop", stop_id=stop_id))
    assert (text_of(deltas), deltas[-1].stop_reason) == ("the", stop_id)


@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_sequence_wherever_tokens_end(tiny: Tokenizer, step: int, include: bool) -> None:
    params = SamplingParams(stop=("e!",), include_stop_str_in_output=include)
    deltas = run(tiny, params, outputs(tiny.encode("the tree! more text"), step=step))
    assert text_of(deltas) == ("the tree!" if include else "the tre")
    finished = [delta for delta in deltas if delta.finish_reason is not None]
    assert [(delta.finish_reason, delta.stop_reason) for delta in finished] == [("stop", "e!")]
    assert sum(len(delta.token_ids) for delta in deltas) == len(tiny.encode("the tree!"))
    assert deltas[-1].num_output_tokens == len(tiny.encode("the tree!"))


def test_pushes_after_the_end_change_nothing(tiny: Tokenizer) -> None:
    text_output = TextOutput(tiny, (), SamplingParams(stop=("!",)))
    (engine,) = outputs(tiny.encode("a!"), step=9)
    assert text_output.push(engine).finish_reason == "stop"
    assert text_output.finished
    late = RequestOutput(request_id="r", token_ids=(5,), finish_reason="abort")
    assert text_output.push(late) == TextDelta(num_output_tokens=2)


def test_abort_shows_the_text_that_was_held_for_a_stop_string(tiny: Tokenizer) -> None:
    text_output = TextOutput(tiny, (), SamplingParams(stop=("abc",)))
    (engine,) = outputs(tiny.encode("xab"), step=9)
    assert text_output.push(engine).text == "x"
    last = text_output.push(RequestOutput(request_id="r", token_ids=(), finish_reason="abort"))
    assert (last.text, last.finish_reason, last.stop_reason) == ("ab", "abort", None)


def test_stop_string_in_the_last_token_wins_over_length(tiny: Tokenizer) -> None:
    deltas = run(tiny, SamplingParams(stop=("c",)), outputs(tiny.encode("abc"), finish="length"))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, text_of(deltas)) == ("stop", "c", "ab")


@pytest.mark.parametrize(("min_tokens", "text", "count"), [(0, "", 1), (2, "a", 2), (3, "aab", 4)])
def test_stop_string_does_not_end_before_min_tokens(tiny: Tokenizer, min_tokens: int, text: str, count: int) -> None:
    deltas = run(tiny, SamplingParams(stop=("a",), min_tokens=min_tokens), outputs(tiny.encode("aabaxx")))
    assert text_of(deltas) == text
    assert deltas[-1].num_output_tokens == count


def test_logprobs_and_token_ids_go_up_to_the_stop(tiny: Tokenizer) -> None:
    ids = tiny.encode("ab!cd")
    logprobs = tuple(TokenLogprobs(token_id=token_id, logprob=-1.0) for token_id in ids)
    output = RequestOutput(request_id="r", token_ids=tuple(ids), logprobs=logprobs)
    delta = TextOutput(tiny, (), SamplingParams(stop=("!",))).push(output)
    assert delta.token_ids == tuple(ids[:3])
    assert delta.logprobs == logprobs[:3]
    assert len(delta.text_offsets) == 3


def test_text_offsets_point_at_each_tokens_text(tiny: Tokenizer) -> None:
    ids = [*tiny.encode("the é!"), *(4 + byte for byte in "日".encode()), *tiny.encode("x")]
    offsets = [offset for delta in run(tiny, SamplingParams(), outputs(ids, step=2)) for offset in delta.text_offsets]
    text = tiny.decode(ids)
    assert len(offsets) == len(ids)
    for index, offset in enumerate(offsets):
        before = tiny.join_bytes(ids[:index])
        assert offset == len(before.decode("utf-8", "ignore"))
        assert tiny.token_text(ids[index])[0] in (text[offset], "\ufffd")


@given(
    ids=st.lists(st.integers(0, 270), max_size=20),
    step=st.integers(1, 5),
    stops=st.lists(st.sampled_from(["the", "é", "\ufffd", " t"]), max_size=2),
)
def test_chunking_never_changes_text_tokens_or_reason(
    tiny: Tokenizer, ids: list[int], step: int, stops: list[str]
) -> None:
    params = SamplingParams(stop=tuple(stops))

    def summary(step: int) -> tuple[object, ...]:
        deltas = run(tiny, params, outputs(ids, finish="length", step=step))
        ends = [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason]
        tokens = [token_id for delta in deltas for token_id in delta.token_ids]
        offsets = [offset for delta in deltas for offset in delta.text_offsets]
        return text_of(deltas), tokens, offsets, ends, deltas[-1].num_output_tokens

    assert summary(step) == summary(1)
    assert len(summary(step)[3]) == 1


def test_bad_words_are_forbidden_at_the_start_and_after_a_space(tiny: Tokenizer, smollm2: Tokenizer) -> None:
    resolved = resolve_bad_words(SamplingParams(bad_words=("Paris", " the")), smollm2)
    spellings = {smollm2.decode(ids) for ids in resolved.bad_word_ids}
    assert spellings == {"Paris", " Paris", "the", " the"}
    assert smollm2.encode(" Paris") == [7042]
    assert (7042,) in resolved.bad_word_ids
    assert resolve_bad_words(SamplingParams(), tiny).bad_word_ids == ()


def test_bad_words_of_sentencepiece_are_found_inside_a_text(sentencepiece: Tokenizer) -> None:
    resolved = resolve_bad_words(SamplingParams(bad_words=("cat",)), sentencepiece)
    in_context = sentencepiece.encode("the cat", add_special_tokens=False)
    assert any(tuple(in_context[-len(ids) :]) == ids for ids in resolved.bad_word_ids)


def test_given_bad_word_ids_are_kept(tiny: Tokenizer) -> None:
    resolved = resolve_bad_words(SamplingParams(bad_words=("x",), bad_word_ids=((9, 9),)), tiny)
    assert resolved.bad_word_ids[0] == (9, 9)
    assert len(resolved.bad_word_ids) == 3


@pytest.mark.parametrize("word", [" ", "\ud800", "\x04"])
def test_bad_word_without_tokens_is_refused(smollm2: Tokenizer, word: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve_bad_words(SamplingParams(bad_words=(word,)), smollm2)
    assert caught.value.param == "bad_words"
