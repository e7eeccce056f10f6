"""Reads what the GPU compilers dump of a kernel: registers, spills, shared memory; knows no kernel."""

import importlib.util
import re
import subprocess
from pathlib import Path

_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


def dump_environment(folder: Path) -> dict[str, str]:
    """What makes XLA and Mosaic GPU write their PTX into a folder; set before jax starts."""
    return {"XLA_FLAGS": f"--xla_dump_to={folder}", "MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}


def kernel_report(folder: Path, since_ns: int, compute_capability: str) -> dict[str, int]:
    """Of the PTX written since a moment, assembled again: most registers a thread, spilled bytes, static shared memory.

    Raises:
      FileNotFoundError: no PTX was written.
    """
    written = [path for path in folder.rglob("*.ptx") if path.stat().st_mtime_ns >= since_ns]
    if not written:
        raise FileNotFoundError(f"no PTX in {folder}: did the kernel compile?")
    reports = [_assemble(path, compute_capability) for path in written]
    return {
        "registers": max(int(n) for report in reports for n in _USED.findall(report)),
        "spills": sum(int(n) for report in reports for n in _SPILLED.findall(report)),
        "shared_bytes": max((int(n) for report in reports for n in _SHARED.findall(report)), default=0),
    }


def _assemble(ptx: Path, compute_capability: str) -> str:
    """ptxas's report. Architectures with features of their own are named with an `a`: sm_90a."""
    own_features = int(compute_capability.partition(".")[0]) >= 9
    arch = f"sm_{compute_capability.replace('.', '')}{'a' if own_features else ''}"
    command = [str(_ptxas()), "-v", f"-arch={arch}", "-o", "/dev/null", str(ptx)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _ptxas() -> Path:
    found = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert found is not None, "scripts/aot installs nvidia-cuda-nvcc-cu12"
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / "bin" / "ptxas"
