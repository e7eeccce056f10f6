"""Bytes that a TPU program moves in HBM, from its optimized HLO: what XLA's cost analysis counts in VMEM as well."""

import re
from typing import Any

from benchmarks.aot.gpu_bytes import bytes_moved

_IN_VMEM = re.compile(r"(\w+)\[[\d,]*\](\{[^{}]*S\(1\)[^{}]*\})")
# An asynchronous copy yields (target, source, …): what counts is the target, where that is HBM, and what it reads.
_COPY = re.compile(r"= \((?P<target>\w+\[[\d,]*\]\{[^{}]*\}), .*?\) copy-start\(")
# An asynchronous slice ((source), target, …) reads as much as it yields, of an operand that is larger.
_SLICE = re.compile(r"= \(\(.*?\), (?P<type>\w+\[[\d,]*\])\{[^{}]*\}, .*?\) slice-start\(.*?\)")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_DONE = re.compile(r" (?:copy|slice)-done\(")


def hbm_bytes(jaxpr: Any, hlo: str) -> float | None:
    """As `gpu_bytes.bytes_moved`, but of what lies in VMEM (memory space 1) nothing counts, however often it is read.

    None for a program with loops, whose trips a TPU's HLO does not tell.
    """
    lines = []
    for line in hlo.splitlines():
        line = _SLICE.sub(r"= \g<type> copy-start()", line)
        line = _COPY.sub(r"= \g<target> copy-start(", line)
        line = _DONE.sub(" bitcast(", line)
        if _KERNEL in line:
            line = line.replace(" custom-call(", " bitcast(")  # it moves what its CostEstimate says
        lines.append(_IN_VMEM.sub(r"\1[0]", line))
    return bytes_moved(jaxpr, "\n".join(lines))
