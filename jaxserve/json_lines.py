"""Files of JSON lines that long runs read and append to, so that an interrupted run can go on; knows no field."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError


def numbered_lines(source: Path) -> Iterator[tuple[int, str]]:
    """Numbered from 1, empty ones left out."""
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def count_lines(source: Path) -> int:
    """How many `numbered_lines` gives; raises ConfigError where the file cannot be read."""
    try:
        return sum(1 for _ in numbered_lines(source))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {source}: {error}") from None


def parse_line(line: str) -> dict[str, Any]:
    """Raises InvalidRequestError where the line is no JSON object."""
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"the line is a JSON {type(values).__name__}; it must be an object")
    return values


def recover(target: Path, total: int, number_of: Callable[[Any], int | None]) -> set[int]:
    """The lines that `target` has results for. A last line that was cut off by an interruption is removed.

    Args:
      total: lines of the input.
      number_of: the input line's number that a result carries; None, or a KeyError or TypeError, where it is none.

    Raises:
      ConfigError: `target` belongs to another kind of run, or to another input.
    """
    if not target.exists():
        return set()
    finished: set[int] = set()
    kept = 0
    with target.open("rb") as results:
        for raw in results:
            if not raw.endswith(b"\n"):
                break
            try:
                number = number_of(json.loads(raw))
            except (ValueError, KeyError, TypeError):
                number = None
            if number is None or number < 1:
                raise ConfigError(f"{target} holds a line that is no result of such a run; choose another output")
            finished.add(number)
            kept += len(raw)
    if len(finished) > total:
        raise ConfigError(
            f"{target} has results for {len(finished)} lines, the input only {total}; choose another output"
        )
    os.truncate(target, kept)
    return finished


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
