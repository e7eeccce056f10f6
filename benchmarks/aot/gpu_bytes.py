"""Bytes that a GPU program moves in HBM, from its optimized HLO: XLA has none for a GPU that is not there."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<args>.*?)\)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%([\w.-]+)|branch_computations=\{(.*?)\}")
_INNER = re.compile(r"(?:to_apply|calls)=%([\w.-]+)")
_BODY = re.compile(r"body=%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton")
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota", "async-done")
_PARTS = ("dynamic-slice", "slice", "gather")  # read no more of their first operand than they return


@dataclass(frozen=True, kw_only=True, slots=True)
class _Instruction:
    name: str
    opcode: str
    operands: tuple[str, ...]
    bytes: int
    is_root: bool
    line: str


_Computations = dict[str, list[_Instruction]]


def bytes_moved(jaxpr: Any, hlo: str) -> float | None:
    """Bytes that a program reads and writes in HBM; None where a loop's trips are not known.

    Every fusion and library call reads its operands and writes its result. Of an operand that a fusion only slices or
    gathers from, the parts count; of one that it scatters into, what is scattered. A loop counts as often as it runs,
    of a branch the cheapest side: no request of the step asks for more than the likeliest token. Kernels move what
    their `CostEstimate`s say.
    """
    computations = _parse(hlo)
    moved = _moved(computations["ENTRY"], computations)
    return None if moved is None else moved + sum(_estimates(jaxpr))


def _estimates(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        estimate = equation.params.get("cost_estimate")
        if estimate is not None:
            yield estimate.bytes_accessed
            continue
        for parameter in equation.params.values():
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                inner = sum(_estimates(getattr(parameter, "jaxpr", parameter)))
                yield inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)


def _parse(hlo: str) -> _Computations:
    """The instructions of each computation by name; the entry's is ENTRY."""
    computations: _Computations = {}
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            computations[name] = []
        elif computations and (found := _INSTRUCTION.match(line)):
            instruction = _Instruction(
                name=found["name"],
                opcode=found["opcode"],
                operands=tuple(_OPERAND.findall(found["args"])),
                bytes=sum(map(_bytes_of, _SHAPE.findall(found["type"]))),
                is_root=bool(found["root"]),
                line=line,
            )
            computations[name].append(instruction)
    return computations


def _moved(instructions: list[_Instruction], computations: _Computations) -> float | None:
    sizes = {instruction.name: instruction.bytes for instruction in instructions}
    total = 0.0
    for instruction in instructions:
        moved = _moved_by(instruction, sizes, computations)
        if moved is None:
            return None
        total += moved
    return total


def _moved_by(instruction: _Instruction, sizes: dict[str, int], computations: _Computations) -> float | None:
    line = instruction.line
    if instruction.opcode in _FREE or any(kernel in line for kernel in _KERNELS):
        return 0
    if instruction.opcode == "while":
        trips, body = _TRIPS.search(line), _BODY.search(line)
        inner = _moved(computations[body[1]], computations) if trips and body else None
        return None if inner is None or trips is None else int(trips[1]) * inner
    if instruction.opcode == "conditional":
        names = [name for found in _BRANCHES.findall(line) for name in _names(*found)]
        sides = [_moved(computations[name], computations) for name in names]
        return min((side for side in sides if side is not None), default=None)
    inner_name = _INNER.search(line)
    if inner_name and instruction.opcode in ("call", "async-start"):
        return _moved(computations[inner_name[1]], computations)
    if inner_name and instruction.opcode == "fusion":
        return _moved_by_fusion(computations[inner_name[1]])
    read = sum(sizes.get(operand, 0) for operand in instruction.operands)
    return instruction.bytes + (instruction.bytes if instruction.opcode in _PARTS else read)


def _names(one: str, several: str) -> list[str]:
    return [one] if one else _OPERAND.findall(several)


def _moved_by_fusion(inner: list[_Instruction]) -> float:
    by_name = {instruction.name: instruction for instruction in inner}

    def source(name: str) -> str:
        """What a bitcast is of."""
        while by_name[name].opcode == "bitcast":
            name = by_name[name].operands[0]
        return name

    def written(name: str) -> int:
        instruction = by_name[source(name)]
        if instruction.opcode == "tuple":
            return sum(map(written, instruction.operands))
        if instruction.opcode in ("scatter", "dynamic-update-slice"):
            return by_name[instruction.operands[2 if instruction.opcode == "scatter" else 1]].bytes
        return instruction.bytes

    read = dict.fromkeys((i.name for i in inner if i.opcode == "parameter"), 0)
    for instruction in inner:
        if instruction.opcode == "bitcast":
            continue
        for position, operand in enumerate(map(source, instruction.operands)):
            if operand not in read:
                continue
            whole = by_name[operand].bytes
            if position == 0 and instruction.opcode in _PARTS:
                read[operand] = min(whole, read[operand] + instruction.bytes)
            elif position > 0 or instruction.opcode not in ("scatter", "dynamic-update-slice"):
                read[operand] = whole
    root = next(instruction for instruction in inner if instruction.is_root)
    return sum(read.values()) + written(root.name)


def _bytes_of(shape: tuple[str, str]) -> int:
    dtype, dimensions = shape
    bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.sub(r"\D", "", dtype) or 0)
    return math.prod(map(int, filter(None, dimensions.split(",")))) * bits // 8
