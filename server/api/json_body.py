"""Reads a request body as JSON and refuses what Python's reader lets through; knows no field by name."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxserve.errors import InvalidRequestError

MAX_DEPTH = 64  # messages, tool schemas and template arguments are far below; jinja and pydantic recurse
MAX_INT_DIGITS = 20  # a signed or unsigned 64-bit integer
MAX_PATH_CHARS = 200  # of a field's place, as an error shows it

# Strict UTF-8 cannot hold a surrogate, so only an escape can bring one in: without one, no string needs a look.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(body: bytes) -> Any:
    """Parses RFC 8259 JSON: no NaN or Infinity, no number beyond a double, no lone surrogate, bounded nesting.

    Raises:
      InvalidRequestError: names the field at fault where one is, e.g. `messages[2].content`.
    """
    suspicious = _SURROGATE_ESCAPE.search(body) is not None
    found_non_finite = False

    def non_finite(text: str) -> float:
        nonlocal found_non_finite
        found_non_finite = True
        return -math.inf if text.startswith("-") else math.inf if "nan" not in text.lower() else math.nan

    def read_float(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else non_finite(text)

    def read_int(text: str) -> int | float:
        return int(text) if len(text.removeprefix("-")) <= MAX_INT_DIGITS else non_finite(text)

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=non_finite, parse_float=read_float, parse_int=read_int)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        _refuse_depth()
    _check(value, [], suspicious or found_non_finite)
    return value


def field_path(location: Sequence[str | int]) -> str:
    """`("messages", 2, "role")` becomes `messages[2].role`; of names without end only the beginning is shown."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:MAX_PATH_CHARS]}" for part in location)
    path = text.removeprefix(".")
    return path if len(path) <= MAX_PATH_CHARS else path[:MAX_PATH_CHARS] + "…"


def _check(value: Any, location: list[str | int], check_scalars: bool) -> None:
    """Args: location: of the value; written out only where something is wrong, for a name may be megabytes long."""
    if isinstance(value, dict | list):
        if len(location) == MAX_DEPTH:
            _refuse_depth()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if check_scalars and isinstance(key, str) and _SURROGATE.search(key):
                raise _wrong("a key under {} holds a lone surrogate", location)
            if check_scalars or isinstance(item, dict | list):
                location.append(key)
                _check(item, location, check_scalars)
                location.pop()
    elif isinstance(value, str):
        if _SURROGATE.search(value):
            raise _wrong("{} holds a lone surrogate, which is no Unicode text", location)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _wrong("{} is NaN, infinite or too large a number; JSON has none of these", location)


def _wrong(what: str, location: Sequence[str | int]) -> InvalidRequestError:
    path = field_path(location)
    return InvalidRequestError(what.format(path or "the body"), param=path or None)


def _refuse_depth() -> NoReturn:
    raise InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels")
