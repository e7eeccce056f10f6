"""Strategies that take something valid and spoil it a little: JSON values, their text, raw bytes; know no format."""

import copy
import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]
Draw = st.DrawFn

# What no Python value can hold, or no encoder writes: put into the JSON text in place of these strings.
_WRITTEN = {
    "<deep 65>": "[" * 65 + "]" * 65,
    "<deep 900>": '{"a":' * 900 + "1" + "}" * 900,
    "<deep 100000>": "[" * 100_000 + "]" * 100_000,
    "<digits>": "9" * 5000,
    "<exponent>": "1e400",
}
_ODD_NUMBERS = (
    *(0, 1, -1, 2, 3, 63, 64, 127, 128, 255, 65536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63, -(2**63), 2**64),
    *(10**400, 0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
)
_ODD_TEXTS = (
    *("", " ", "a", "\0", "\n", "\ud800", "\ufffd", "🙂", "é" * 3000, "9" * 5000, "../x", "/etc/passwd", "x" * 300),
    *("{{ x }}", "{% for i in range(9) %}{% endfor %}", "<|im_end|>", "true", "-1", "1e999", "data: [DONE]\n\n"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [None], {"": None}, {"type": "text"}),
    *_ODD_NUMBERS,
    *_ODD_TEXTS,
    *_WRITTEN,
)
_ODD_INTS = (
    0,
    1,
    2,
    7,
    8,
    12,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def paths(value: Any, prefix: Path = ()) -> Iterator[Path]:
    """Every place in a JSON value, the whole included."""
    yield prefix
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*prefix, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _odd_value() -> st.SearchStrategy[Any]:
    return st.sampled_from(ODD_VALUES).map(copy.deepcopy)  # what it is put into may be edited again


@st.composite
def edited_json(draw: Draw, value: Any, *, names: Sequence[str] = ()) -> Any:
    """A copy with one to three places replaced, dropped, renamed, repeated, added to, or taken from elsewhere in it.

    Args:
      names: keys that some object may have and this value need not.
    """
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(paths(value))))
        if not place:
            if draw(st.integers(0, 19)) == 0:
                return draw(_odd_value())
            continue
        holder, key = _at(value, place[:-1]), place[-1]
        action = draw(st.sampled_from(("replace", "replace", "replace", "drop", "copy", "rename", "repeat", "add")))
        if action == "replace":
            holder[key] = draw(_odd_value())
        elif action == "drop":
            del holder[key]
        elif action == "copy":
            source = copy.deepcopy(_at(value, draw(st.sampled_from(list(paths(value))))))
            holder[key] = source
        elif action == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from((*names, *_ODD_TEXTS)))] = holder.pop(key)
        elif action == "repeat" and isinstance(holder, list) and len(holder) < 200:
            holder *= draw(st.sampled_from((2, 3, 50)))
        elif action == "add":
            target = holder[key] if isinstance(holder[key], dict | list) else holder
            odd = draw(_odd_value())
            if isinstance(target, dict):
                target[draw(st.sampled_from((*names, "x", "")))] = odd
            elif isinstance(target, list):
                target.append(odd)
    return value


def json_text(value: Any) -> str:
    text = json.dumps(value)
    for marker, written in _WRITTEN.items():
        text = text.replace(f'"{marker}"', written)
    return text


@st.composite
def json_bytes(draw: Draw, value: Any, *, names: Sequence[str] = ()) -> bytes:
    """An edited value as JSON, mostly in UTF-8 and whole."""
    text = json_text(draw(edited_json(value, names=names)))
    how = draw(st.sampled_from(("utf-8",) * 12 + ("utf-8-sig", "utf-16", "utf-32", "latin-1", "bytes", "twice")))
    if how == "bytes":
        return draw(edited_bytes(text.encode()))
    if how == "twice":
        return (text + text).encode()
    return text.encode(how, "replace")


@st.composite
def edited_bytes(draw: Draw, blob: bytes, *, head: int | None = None) -> bytes:
    """A copy with one to four places overwritten, cut out, doubled or cut short.

    Args:
      head: edits begin within so many first bytes.
    """
    data = bytearray(blob)
    for _ in range(draw(st.integers(1, 4))):
        limit = min(len(data), head or len(data))
        if not limit:
            return draw(st.binary(max_size=64))
        at = draw(st.integers(0, limit - 1))
        action = draw(st.sampled_from(("flip", "byte", "int", "int", "cut", "double", "insert", "end")))
        if action == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif action == "byte":
            data[at] = draw(st.integers(0, 255))
        elif action == "int":
            size, code = draw(st.sampled_from(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q"))))
            number = draw(st.sampled_from(_ODD_INTS)) % (1 << 8 * size)
            data[at : at + size] = struct.pack(code, number)
        elif action == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif action == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        elif action == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=32))
        else:
            del data[at:]
    return bytes(data)
