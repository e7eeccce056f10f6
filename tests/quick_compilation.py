"""Compiles what tests run only once to slower code, in a third of the time: no LLVM optimization, no MLIR on the way.

Small models run for milliseconds and take seconds to compile. What comes out is XLA's program all the same, as far as
LLVM; the embedded model's tests and the servers in processes of their own run what users run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.stages import Compiled, Lowered

QUICK_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # since then there is no other way
    QUICK_OPTIONS["xla_cpu_use_fusion_emitters"] = False

XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK_OPTIONS.items())

_compile = Lowered.compile


def _compile_quickly(lowered: Lowered) -> Compiled:
    return _compile(lowered, QUICK_OPTIONS)


@contextmanager
def quick_compilation() -> Iterator[None]:
    """What is compiled ahead of time in this block, as an engine's programs are, on whichever thread."""
    Lowered.compile = _compile_quickly  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Lowered.compile = _compile  # type: ignore[method-assign]
