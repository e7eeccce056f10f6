"""JSON bodies: what Python's reader lets through and JSON does not have is refused, with the field's name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from server.api.json_body import MAX_DEPTH, parse_json

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Strings of Unicode text: everything but surrogates, astral characters included.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda children: st.lists(children) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), children),
    max_leaves=20,
)


@given(value=JSON, ascii_only=st.booleans())
def test_valid_json_is_read_as_it_is(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": Infinity}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"a": [1, {"b": -1e999}]}', "a[1].b"),
        (b'{"metadata": {"x": {"y": [NaN]}}}', "metadata.x.y[0]"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": ["ok", "x\\udfffy"]}', "prompt[1]"),
        (b'{"a": {"\\ud83d": 1}}', "a"),
    ],
)
def test_numbers_and_text_that_json_does_not_have_are_refused_by_field(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_json(body)
    assert caught.value.param == param


def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    assert parse_json(b'"\\ud83c\\udf89"') == "🎉"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nope", b"\xff\xfe", b'{"a": 1}x', b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b"{'a': 1}"]
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="body"):
        parse_json(body)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
@pytest.mark.parametrize(("before", "after"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_refused_before_anything_recurses_on_it(depth: int, before: bytes, after: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        parse_json(before * depth + b"1" + after * depth)


def test_nesting_up_to_the_limit_is_read() -> None:
    parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


def test_a_name_of_megabytes_is_neither_repeated_nor_written_out_for_each_value_under_it() -> None:
    name = b"k" * 2**21
    lists = b",".join([b"[]"] * 2**17)
    parse_json(b'{"%s": [%s]}' % (name, lists))  # a copy of the name for each list would be 256 GiB
    with pytest.raises(InvalidRequestError, match="NaN") as caught:
        parse_json(b'{"%s": [%s, NaN]}' % (name, lists))
    assert len(caught.value.message) < 300
    assert caught.value.param is not None
    assert caught.value.param.startswith("kkk")
