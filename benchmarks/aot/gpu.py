"""Reads what the GPU compilers say of a kernel: registers, spills, shared memory, bytes moved; knows no kernel."""

import importlib.util
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_USED = re.compile(r"Used (\d+) registers")
_LAUNCH = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
_SPILLED = re.compile(r"(\d+) bytes spill stores")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton")
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota")


def dump_environment(folder: Path) -> dict[str, str]:
    """What makes XLA and Mosaic GPU write their PTX into a folder; set before jax starts."""
    return {"XLA_FLAGS": f"--xla_dump_to={folder}", "MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}


def kernel_report(folder: Path, since_ns: int, compute_capability: str, kernel: str) -> dict[str, int]:
    """Of one kernel, from what was written since a moment: registers a thread, spilled bytes, shared memory.

    Raises:
      FileNotFoundError: the kernel's PTX was not written.
    """
    new = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime_ns >= since_ns]
    ptx = [path for path in new if path.suffix == ".ptx" and f".entry {kernel}" in path.read_text()]
    if not ptx:
        raise FileNotFoundError(f"no PTX of {kernel} in {folder}: did it compile?")
    reports = [_assemble(path, compute_capability) for path in ptx]
    report = {
        "registers": max(int(n) for report in reports for n in _USED.findall(report)),
        "spills": sum(int(n) for report in reports for n in _SPILLED.findall(report)),
    }
    # Asked for at launch, so that ptxas knows nothing of it; Mosaic's log of its passes does.
    launches = [n for path in new if path.suffix == ".log" for n in _LAUNCH.findall(_beginning(path))]
    return report | ({"shared_bytes": max(map(int, launches))} if launches else {})


def _beginning(path: Path, characters: int = 4_000_000) -> str:
    with path.open() as file:
        return file.read(characters)


def bytes_moved(jaxpr: Any, hlo: str) -> float | None:
    """Bytes that a program reads and writes in HBM, by its optimized HLO; None where a loop's trips are not known.

    XLA has no cost analysis for a GPU that is not there. Every fusion and library call reads its operands and writes
    its result; an elementwise one reads no more of an operand than its result has elements (a gather's source is not
    read whole), a scatter only what it scatters. Kernels move what their `CostEstimate`s say.
    """
    computations = _computations(hlo)
    kernels = sum(_estimates(jaxpr))
    moved = _moved(computations["ENTRY"], computations)
    return None if moved is None else moved + kernels


def _estimates(jaxpr: Any) -> Iterator[int]:
    for equation in jaxpr.eqns:
        estimate = equation.params.get("cost_estimate")
        if estimate is not None:
            yield estimate.bytes_accessed
            continue
        for parameter in equation.params.values():
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                yield from _estimates(getattr(parameter, "jaxpr", parameter))


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation by name; the entry's is ENTRY."""
    computations: dict[str, list[str]] = {}
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            computations[name] = []
        elif line.startswith("  ") and computations:
            computations[name].append(line)
    return computations


def _moved(lines: list[str], computations: dict[str, list[str]]) -> float | None:
    sizes: dict[str, int] = {}
    total = 0.0
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, result_type, opcode, operands = match.groups()
        sizes[name] = sum(map(_bytes_of, _SHAPE.findall(result_type)))
        read = [sizes.get(operand, 0) for operand in _OPERAND.findall(operands)]
        if opcode == "while":
            return None
        if opcode == "call":
            target = re.search(r"to_apply=%([\w.-]+)", line)
            inner = _moved(computations[target.group(1)], computations) if target else None
            if inner is None:
                return None
            total += inner
        elif any(kernel in line for kernel in _KERNELS) or opcode in _FREE:
            continue
        elif "scatter" in name:
            total += 2 * (sum(read) - max(read))
        elif "kind=kLoop" in line:
            total += sizes[name] + sum(min(size, 4 * sizes[name]) for size in read)
        else:
            total += sizes[name] + sum(read)
    return total


def _bytes_of(shape: tuple[str, str]) -> int:
    dtype, dimensions = shape
    bits = {"pred": 8, "bf16": 16}.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
    return math.prod(map(int, filter(None, dimensions.split(",")))) * bits // 8


def _assemble(ptx: Path, compute_capability: str) -> str:
    """ptxas's report; Mosaic leaves one. Architectures with features of their own are named with an `a`: sm_90a."""
    if ptx.with_suffix(".ptxas").exists():
        return ptx.with_suffix(".ptxas").read_text()
    own_features = int(compute_capability.partition(".")[0]) >= 9
    arch = f"sm_{compute_capability.replace('.', '')}{'a' if own_features else ''}"
    command = [str(_ptxas()), "-v", f"-arch={arch}", "-o", "/dev/null", str(ptx)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _ptxas() -> Path:
    found = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert found is not None, "scripts/aot installs nvidia-cuda-nvcc-cu12"
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / "bin" / "ptxas"
