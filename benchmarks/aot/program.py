"""One program of a table: what it is called, what decides its record, and how to get it; compiles nothing itself."""

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels.paged_attention import BackendName

Record = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent
VERSIONED = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")

# What a program of each kind is compiled from. Who only chooses (api.py, the engine's configuration) decides nothing
# here: a backend and a shape are named.
_ATTENTION: Mapping[BackendName, tuple[str, ...]] = {
    "tpu": ("tpu", "tpu_stream", "tpu_widen", "tuning"),
    "gpu_mosaic": ("gpu_mosaic", "gpu_cores", "codes", "splits", "tuning"),
    "gpu_triton": ("gpu_triton", "codes", "splits", "tuning"),
    "xla": ("xla",),
}
PAGES = ("pallas_kernels/kv_format.py", "pallas_kernels/kv_dtype.py", "pallas_kernels/bits.py")
WRITES = ("pallas_kernels/kv_write/*.py",)
STEPS = (
    *WRITES,
    *(f"models/{name}.py" for name in ("attend", "hadamard", "layers", "llama", "partition", "step")),
    *(f"jaxserve/device/{name}.py" for name in ("batch", "programs", "sampling", "sharding")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Something to compile.

    Attributes:
      labels: name, backend and whatever else the table calls it.
      key: changes whenever its record may: see `key_of`.
      measure: compiles it.
    """

    labels: Record
    key: str
    measure: Callable[[], Record]


def key_of(shape: object, backend: BackendName, *patterns: str) -> str:
    """A digest of what is compiled: its shape (by `repr`), our sources, and the compilers' versions."""
    attention = (f"pallas_kernels/paged_attention/{name}.py" for name in _ATTENTION[backend])
    sources = _digest((*attention, *PAGES, *patterns))
    return hashlib.sha256(f"{shape!r} {sources} {_versions()}".encode()).hexdigest()[:16]


@cache
def _digest(patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> str:
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    return repr([installed.get(name) for name in VERSIONED])
