"""Markdown tables and their cells; knows no compiler."""

from collections.abc import Sequence
from typing import Any

from benchmarks.aot.program import Record


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Nothing where there are no rows."""
    if not rows:
        return []
    lines = [head, ("---",) * len(head), *rows]
    return ["\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"]


def mega(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"


def ratio(record: Record) -> str:
    """Bytes over the least; empty where they are not known."""
    return f"{record['bytes'] / record['least_bytes']:.2f}" if record.get("bytes") else ""
