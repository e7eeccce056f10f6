"""Reads what the GPU compilers say of a kernel: registers, spills, shared memory; knows no kernel."""

import importlib.util
import re
import subprocess
from pathlib import Path

_USED = re.compile(r"Used (\d+) registers")
# Shared memory is asked for at launch, so that ptxas knows nothing of it; logs of the compilers' passes do.
_LAUNCH = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
_TRITON_SHARED = re.compile(r"ttg\.shared = (\d+) : i32")
# Makes XLA write down every pass over a Triton kernel, which takes it a minute.
TRITON_PASSES = {"xla_dump_emitter_re": "triton"}
_SPILLED = re.compile(r"(\d+) bytes spill stores")


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
    shared = [n for path in new if path.suffix == ".log" for n in _LAUNCH.findall(_beginning(path))]
    passes = [path for path in new if f"{kernel}_triton.triton-to-llvm" in path.name]
    shared += [n for path in passes for n in _TRITON_SHARED.findall(path.read_text())]
    return report | ({"shared_bytes": max(map(int, shared))} if shared else {})


def _beginning(path: Path, characters: int = 4_000_000) -> str:
    with path.open() as file:
        return file.read(characters)


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
