"""What travels between devices, read from a compiled program's text; knows HLO, not what the program is for."""

import math
import re
from collections import Counter
from dataclasses import dataclass

_KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
# `%x = bf16[64,4096]{1,0:T(8,128)} all-reduce(...)`; asynchronous ones have a `-start`, whose result is a tuple.
_INSTRUCTION = re.compile(rf"= (?P<result>[^=]*?) (?P<kind>{_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BITS = re.compile(r"\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Equal collectives of one program.

    Attributes:
      kind: all-reduce, all-gather, …
      result: what each device has afterwards, such as `bf16[64,4096]`.
      result_bytes: of one of them.
      count: instructions; those in a branch or a loop count once.
      op_name: where the first of them comes from, as jax names it.
    """

    kind: str
    result: str
    result_bytes: int
    count: int
    op_name: str


def collectives(hlo: str) -> tuple[Collective, ...]:
    """The collectives of an optimized HLO module, in the order in which they first stand there."""
    counts: Counter[tuple[str, str]] = Counter()
    origins: dict[tuple[str, str], str] = {}
    for line in hlo.splitlines():
        found = _INSTRUCTION.search(line)
        if found is None:
            continue
        arrays = [match.group(0) for match in _ARRAY.finditer(found["result"])]
        if not arrays:
            continue
        key = found["kind"], arrays[-1]  # of an asynchronous one, the result stands behind the operand
        counts[key] += 1
        origin = _OP_NAME.search(line)
        origins.setdefault(key, origin[1] if origin else "")
    return tuple(
        Collective(kind=kind, result=result, result_bytes=_bytes(result), count=count, op_name=origins[kind, result])
        for (kind, result), count in counts.items()
    )


def _bytes(result: str) -> int:
    array = _ARRAY.fullmatch(result)
    assert array is not None
    bits = _BITS.search(array["dtype"])  # pred has none: a byte
    size = math.prod(int(dim) for dim in array["dims"].split(",") if dim)
    return size * max(8, int(bits[0]) if bits else 8) // 8
