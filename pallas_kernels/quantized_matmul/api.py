"""What the GPU's kernel for narrow matrices can multiply, alone and on a mesh; knows arrays and shapes, no model."""

import functools
import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec

log = logging.getLogger(__name__)

MatmulBackend = Literal["cpu", "gpu_triton", "xla"]  # of one that is named, XLA does what it cannot
Kernel = Callable[[Array, Array, Array, Array | None], Array]  # x, codes, scales, zeros: see `gpu_triton`
MOST_TOKENS = 256  # see `find_kernel`
SOURCES = [Path(__file__).with_name("gpu_triton.py")]  # what decides the program, and is imported where it is used only


def unsupported_by_gpu(
    matrices: Iterable[tuple[int, int, int]], *, code_dtype: Any, dtype: Any, compute_capability: float | None
) -> str | None:
    """Why `gpu_triton` can multiply with none of some matrices; None: with one at least.

    Args:
      matrices: outputs, inputs and groups of each, as one device has them.
      dtype: of the activations.
      compute_capability: of the GPU; None: it is not there to be asked.
    """
    unsupported = _gpu_module().unsupported
    reasons = [unsupported(code_dtype, dtype, *matrix, compute_capability) for matrix in matrices]
    return None if None in reasons else reasons[0]


def find_kernel(x: Array, codes: Array, scales: Array, *, has_whole_inputs: bool = True) -> Kernel | None:
    """`gpu_triton` for one matrix; None: XLA is better with it.

    XLA widens 4-bit weights to memory first, which moves seven times the bytes. With many tokens it is the tensor cores
    that take the time, and a kernel that widens each weight again for every tile of tokens keeps them waiting: those
    XLA multiplies. A matrix that the kernel cannot take is named once.

    Args:
      x: [tokens, inputs]; codes: [outputs, inputs]; scales: [outputs, groups]. Read for their types alone: they may be
        traced, and know the mesh that they are on. The devices are GPUs that can (`unsupported_by_gpu`).
      has_whole_inputs: on a mesh a device has all inputs of some outputs; False: all outputs, of some inputs.
    """
    if x.shape[0] > MOST_TOKENS:
        return None
    mesh = jax.typeof(codes).sharding.mesh  # empty where nothing was said
    devices = 1 if mesh.empty else mesh.size
    outputs, inputs, groups = *codes.shape, scales.shape[1]
    if has_whole_inputs:
        outputs //= devices
    else:
        inputs, groups = inputs // devices, max(1, groups // devices)
    module = _gpu_module()
    reason = module.unsupported(codes.dtype, x.dtype, outputs, inputs, groups, None)
    if reason is not None:
        _say(reason)
        return None
    kernel: Kernel = functools.partial(module.quantized_matmul, interpret=False)
    return kernel if devices == 1 else on_mesh(kernel, mesh, has_whole_inputs=has_whole_inputs)


def _gpu_module() -> ModuleType:
    """Imported on its first use: Pallas for GPUs is a third of a second that a CPU has no use for."""
    return import_module("pallas_kernels.quantized_matmul.gpu_triton")


def on_mesh(kernel: Kernel, mesh: AbstractMesh, *, has_whole_inputs: bool) -> Kernel:
    """The same on a mesh of one axis: each device multiplies with its own part of the matrix; see `find_kernel`."""
    (axis,) = mesh.axis_names
    by_row, by_column, whole = PartitionSpec(axis), PartitionSpec(None, axis), PartitionSpec()

    def run(x: Array, codes: Array, scales: Array, zeros: Array | None) -> Array:
        if has_whole_inputs:
            of_x, of_codes, of_scales, of_out = whole, by_row, by_row, by_column
        else:
            of_x, of_codes, of_out = by_column, by_column, whole
            of_scales = by_column if scales.shape[1] > 1 else whole

        def own_part(*parts: Any) -> Array:
            out = kernel(*parts)
            return out if has_whole_inputs else jax.lax.psum(out, axis)

        sharded = jax.shard_map(
            own_part,
            mesh=mesh,
            in_specs=(of_x, of_codes, of_scales, of_scales),
            out_specs=of_out,
            check_vma=False,  # kernels do not say how their outputs vary
        )
        out: Array = sharded(x, codes, scales, zeros)
        return out

    return run


@functools.cache
def _say(reason: str) -> None:
    """Once for each reason: a model asks for each of its matrices."""
    log.warning("4-bit weights are widened in memory before they are multiplied: %s", reason)
