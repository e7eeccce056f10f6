"""What every target must reach, and whether it does: read from the records; compiles nothing."""

from collections.abc import Iterable, Sequence

from benchmarks.aot.program import Record
from benchmarks.aot.tables import ratio, table
from benchmarks.aot.targets import TARGETS

MOST_BYTES = 1.10  # times the least, of decode at 64 x 4k
FORMATS = {
    "bfloat16": "decode 64 × 4k",
    "float16": "decode 64 × 4k, float16",
    "float32": "decode 64 × 4k, float32",
    **{name: f"decode 64 × 4k, {name} pages of 128" for name in ("int8", "fp8_e4m3", "fp8_e5m2", "int4")},
}


def bar(records: Sequence[Record]) -> list[str]:
    rows = []
    for name, target in TARGETS.items():
        of_target = [record for record in records if record["target"] == name]
        for backend in (backend for backend in target.backends if backend != "xla"):
            ours = [record for record in of_target if record.get("backend") == backend]
            rows.append((name, backend, *_compiled(ours), *_bytes(ours)))
    head = ("target", "backend", "kernels", "their reports", "spills", "whole steps", *FORMATS)
    return [
        "## The bar\n",
        "Every kernel and the whole step compile, nothing spills, and decoding 64 × 4k tokens moves at most "
        f"{MOST_BYTES:.2f} times the least bytes, whatever the format of the pages (the last columns: bytes over the "
        "least). *no*: the backend refuses that format, and says why below; **bold**: missed.\n",
        *table(head, rows),
    ]


def _compiled(ours: Iterable[Record]) -> tuple[str, str, str, str]:
    kernels, reports, steps = ([r for r in ours if r["what"] == what] for what in ("kernels", "reports", "steps"))
    wanted = [record for record in kernels if "skipped" not in record]
    spills = [record["spills"] for record in reports if "spills" in record]
    fitting = [record for record in steps if "skipped" not in record]
    return (
        _count(sum("seconds" in record for record in wanted), len(wanted)),
        _count(len(spills), len(wanted)),
        _bold(str(max(spills, default="")), any(spills)),
        _count(sum("seconds" in record for record in fitting), len(fitting)),
    )


def _bytes(ours: Iterable[Record]) -> list[str]:
    by_name = {record["name"]: record for record in ours if record["what"] == "kernels"}
    cells = []
    for case in FORMATS.values():
        record = by_name.get(case, {})
        is_missed = record.get("bytes", 0) > MOST_BYTES * record.get("least_bytes", 1)
        cells.append("no" if "skipped" in record else _bold(ratio(record), is_missed))
    return cells


def _count(have: int, of: int) -> str:
    return _bold(f"{have} of {of}", have < of or not of)


def _bold(text: str, is_missed: bool) -> str:
    return f"**{text}**" if is_missed and text else text
