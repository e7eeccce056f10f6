"""The detokenizer's deltas join to the whole decode, whatever the tokens and however they are cut."""

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_metadata import tiny_metadata

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.gguf_tokenizer import build_gguf_tokenizer
from jaxserve.text.tokenizer import Tokenizer

TINY = Tokenizer(build_gguf_tokenizer(Path("tiny.gguf"), tiny_metadata()))
BYTE = dict.fromkeys(range(256), TINY.vocab_size)
for _id in reversed(range(TINY.vocab_size)):
    if len(TINY.token_bytes(_id)) == 1:
        BYTE[TINY.token_bytes(_id)[0]] = _id

# Texts whose characters span tokens, cut into single bytes or by the vocabulary, between arbitrary and broken tokens.
pieces = st.one_of(
    st.lists(st.integers(0, TINY.vocab_size - 1), max_size=5),
    st.text(max_size=5).map(lambda text: [BYTE[byte] for byte in text.encode()]),
    st.sampled_from(["the 😀", "日本", "e\u0301", "👩‍👩‍👧‍👦", "\ufffd", "한국", "<|end|>", " "]).map(TINY.encode),
    st.lists(st.sampled_from([BYTE[b] for b in b"\xf0\x9f\x98\x80\xe6\x97\xa5\xef\xbf\xbd\xc2\xff A"]), max_size=6),
)
sequences = st.lists(pieces, max_size=6).map(lambda parts: [token_id for part in parts for token_id in part])


def sentencepiece_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    byte_ids = [
        tokenizer.spec.backend.token_to_id(f"<0x{byte:02X}>")
        for byte in b"\xf0\x9f\x98\x80\xe6\x97\xa5\xef\xbf\xbd\xff A"
    ]
    return st.lists(st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(byte_ids)), max_size=20)


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


def stream(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join(map(detokenizer.push, chunks)) + detokenizer.finish()


def unfinished(raw: bytes) -> bytes:
    """The end of `raw` that a character still needs bytes for, by trying every character's beginning."""
    for length in (3, 2, 1):
        tail = raw[-length:] if length <= len(raw) else b""
        for fill in (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xa0", b"\xa0\x80", b"\x90\x80\x80", b"\x90\x80"):
            try:
                if tail and len((tail + fill).decode()) == 1:
                    return tail
            except UnicodeDecodeError:
                continue
    return b""


def added_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the docstring promises, from whole decodes alone."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    tail = unfinished(tokenizer.join_bytes(prompt, skip_special_tokens=skip))
    following = (tail + tokenizer.join_bytes(output, skip_special_tokens=skip))[:4]
    completes = tail and any(is_character(following[:length]) for length in (2, 3, 4) if length > len(tail))
    if completes:
        before = before[: len(before) - len(tail.decode("utf-8", tokenizer.utf8_errors))]
    assert whole.startswith(before)
    return whole[len(before) :]


def is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(ids=sequences, cuts=st.lists(st.integers(0, 99)), skip=st.booleans())
def test_deltas_join_to_the_whole_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TINY, skip_special_tokens=skip)
    assert stream(detokenizer, chunked(ids, cuts)) == TINY.decode(ids, skip_special_tokens=skip)


@given(prompt=sequences, output=sequences, cuts=st.lists(st.integers(0, 99)), skip=st.booleans())
def test_deltas_join_to_what_the_output_adds_to_the_prompt(
    prompt: list[int], output: list[int], cuts: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(TINY, prompt, skip_special_tokens=skip)
    assert stream(detokenizer, chunked(output, cuts)) == added_text(TINY, prompt, output, skip)


@given(data=st.data(), cuts=st.lists(st.integers(0, 99)), skip=st.booleans())
def test_sentencepiece_deltas_join_to_the_whole_decode(
    sentencepiece: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokens = sentencepiece_tokens(sentencepiece)
    prompt, output = data.draw(tokens), data.draw(tokens)
    alone = Detokenizer(sentencepiece, skip_special_tokens=skip)
    assert stream(alone, chunked(output, cuts)) == sentencepiece.decode(output, skip_special_tokens=skip)
    detokenizer = Detokenizer(sentencepiece, prompt, skip_special_tokens=skip)
    assert stream(detokenizer, chunked(output, cuts)) == added_text(sentencepiece, prompt, output, skip)


@given(ids=sequences)
def test_at_most_three_bytes_are_held_back(ids: list[int]) -> None:
    detokenizer, shown = Detokenizer(TINY, skip_special_tokens=False), ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push([token_id])
        raw = TINY.join_bytes(ids[:count], skip_special_tokens=False)
        held = unfinished(raw)
        assert len(held) <= 3
        assert shown == raw[: len(raw) - len(held)].decode("utf-8", "replace")


def test_embedded_models_emoji_appears_with_its_last_token(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦜 ok")
    assert len(ids) > 3  # the parrot has no token of its own
    detokenizer = Detokenizer(smollm2)
    deltas = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(deltas) == "🦜 ok"
    assert deltas[0] == ""
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_character_is_the_outputs_wherever_the_prompt_cuts_it(cut: int) -> None:
    ids = [BYTE[byte] for byte in "a😀".encode()]
    prompt, output = ids[: 1 + cut], ids[1 + cut :]
    assert stream(Detokenizer(TINY, prompt), [[token_id] for token_id in output]) == "😀"


def test_prompt_that_ends_inside_a_character() -> None:
    first, second, third, fourth = (BYTE[byte] for byte in "😀".encode())
    assert stream(Detokenizer(TINY, [BYTE[65], first, second]), [[third], [fourth, BYTE[66]]]) == "😀B"
    # not completed: the broken character was the prompt's
    assert stream(Detokenizer(TINY, [first, second]), [[BYTE[66]]]) == "B"
    assert stream(Detokenizer(TINY, [first, second]), [[third], [BYTE[66]]]) == "B"
    assert stream(Detokenizer(TINY, [first, second]), []) == ""
    # a whole one before it changes nothing
    assert stream(Detokenizer(TINY, [first, second, third, fourth]), [[third]]) == "\ufffd"


def test_dropping_a_special_token_joins_the_bytes_around_it() -> None:
    first, second = (BYTE[byte] for byte in "é".encode())
    end = TINY.eos_token_ids[0]
    assert stream(Detokenizer(TINY), [[first], [end], [second]]) == "é"
    shown = stream(Detokenizer(TINY, skip_special_tokens=False), [[first], [end], [second]])
    assert shown == "\ufffd<|end|>\ufffd"


def test_sentencepiece_space_is_dropped_only_where_a_text_begins(sentencepiece: Tokenizer) -> None:
    the, cat = sentencepiece.encode("the", add_special_tokens=False), sentencepiece.encode("cat")[1:]
    assert sentencepiece.token_bytes(the[0]).startswith(b" ")
    assert stream(Detokenizer(sentencepiece), [the, cat]) == "the cat"
    assert stream(Detokenizer(sentencepiece, [sentencepiece.bos_token_id or 0]), [the]) == "the"
    assert stream(Detokenizer(sentencepiece, the), [cat]) == " cat"
    space = sentencepiece.spec.backend.token_to_id("▁")
    assert space is not None
    assert stream(Detokenizer(sentencepiece), [[space], [space], the]) == "  the"


@pytest.mark.parametrize("raw", [b"\xff", b"\x80", b"\xf0", b"\xf0\x9f", b"\xe6\x97\xff"])
def test_broken_bytes_stream_in_linear_time_and_are_not_held_back(raw: bytes) -> None:
    ids = [BYTE[byte] for byte in raw] * (100_000 // len(raw))
    detokenizer = Detokenizer(TINY)
    started = time.process_time()
    shown = 0
    for count, token_id in enumerate(ids, start=1):
        shown += len(detokenizer.push([token_id]))
        assert shown >= count // len(raw) - 3
    assert time.process_time() - started < 2.0  # about 0.1 s; quadratic work would take minutes
    assert shown + len(detokenizer.finish()) == len(TINY.decode(ids))
