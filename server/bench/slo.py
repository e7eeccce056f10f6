"""Promises about latency: how they are written, and whether a request kept them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from server.bench.errors import BenchError
from server.bench.result import Result

Measure = Literal["ttft", "itl", "tpot", "e2e"]
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(us|ms|s|m|)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """`measure` of a request stays within `limit_s`.

    Attributes:
      percent: of requests (of token gaps, for `itl`) that must keep it; None: every request by itself, for goodput.
    """

    measure: Measure
    limit_s: float
    percent: int | None = None

    def __str__(self) -> str:
        name = self.measure if self.percent is None else f"{self.measure}_p{self.percent}"
        return f"{name}={self.limit_s * 1e3:g} ms" if self.limit_s < 1 else f"{name}={self.limit_s:g} s"

    def is_kept_by(self, result: Result) -> bool:
        """Whether this request kept it; a failed one keeps nothing. Of `itl`, the longest gap counts."""
        if not result.ok:
            return False
        match self.measure:
            case "ttft":
                seconds = result.ttft_s
            case "tpot":
                seconds = result.tpot_s
            case "itl":
                seconds = max((gap.seconds for gap in result.token_gaps()), default=0.0)
            case "e2e":
                seconds = result.e2e_s
        return seconds is None or seconds <= self.limit_s


def is_good(result: Result, promises: Sequence[Promise]) -> bool:
    return all(promise.is_kept_by(result) for promise in promises) and result.ok


def parse_promise(text: str) -> Promise:
    """`ttft=500ms`, `itl_p95=50ms`. Raises BenchError."""
    name, equals, duration = text.partition("=")
    measure, has_percent, percent = name.strip().partition("_p")
    if not equals or measure not in get_args(Measure) or (has_percent and percent not in ("50", "90", "95", "99")):
        raise BenchError(
            f"the promise is {text!r}; it must be one of {', '.join(get_args(Measure))}, with _p50, _p90, _p95 or _p99 "
            "where a percentile is meant, and a duration: ttft_p95=500ms"
        )
    seconds = parse_seconds(duration.strip())
    if seconds <= 0:
        raise BenchError(f"the promise is {text!r}; its duration must be positive")
    return Promise(measure=measure, limit_s=seconds, percent=int(percent) if has_percent else None)  # type: ignore[arg-type]


def parse_seconds(text: str) -> float:
    """`500ms`, `2s`, `0.5`, `2m`. Raises BenchError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise BenchError(f"{text!r} is no duration; write 500ms, 2s or 5m")
    return float(match[1]) * _UNITS[match[2]]


def format_pair(first: float, second: float, separator: str = "  ") -> str:
    """Two durations, the first without its unit where both have the same."""
    left, right = format_seconds(first), format_seconds(second)
    number, _, unit = left.partition(" ")
    return f"{number if unit == right.partition(' ')[2] else left}{separator}{right}"


def format_seconds(seconds: float) -> str:
    """Three digits: `4.21 ms`, `187 ms`, `12.5 s`."""
    if seconds < 0.9995e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s" if seconds < 999.5 else f"{seconds:.0f} s"


def _three_digits(value: float) -> str:
    return "0" if value == 0 else f"{value:#.3g}".rstrip(".")
