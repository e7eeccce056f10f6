"""Whether a kernel of ours multiplies with a narrow matrix on the devices that hold it; knows arrays, no model."""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, PartitionSpec

log = logging.getLogger(__name__)

MatmulBackend = Literal["cpu", "xla"]  # xla: or the kernel that `find_kernel` finds
Kernel = Callable[[Array, Array, Array, Array | None], Array]  # x, codes, scales, zeros: see `gpu_triton`
MOST_TOKENS = 256  # see `find_kernel`
SOURCES = [Path(__file__).with_name("gpu_triton.py")]  # what decides the program, and is imported where it is used only


def find_kernel(x: Array, codes: Array, scales: Array, *, has_whole_inputs: bool = True) -> Kernel | None:
    """What multiplies 4-bit weights faster than XLA, which widens them to memory first; None: XLA does.

    For a GPU alone, where XLA's way moves seven times the bytes. With many tokens it is the tensor cores that take the
    time, and a kernel that widens each weight again for every tile of tokens keeps them waiting: those XLA multiplies.
    A matrix that the kernel cannot take is named once.

    Args:
      x: [tokens, inputs]; codes: [outputs, inputs]; scales: [outputs, groups]. Read for their types alone: they may be
        traced, and know the mesh that they are on.
      has_whole_inputs: on a mesh a device has all inputs of some outputs; False: all outputs, of some inputs.
    """
    mesh = jax.typeof(codes).sharding.mesh  # empty where nothing was said
    device = mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if codes.dtype != jnp.int4 or platform != "gpu" or x.shape[0] > MOST_TOKENS:
        return None
    module = import_module("pallas_kernels.quantized_matmul.gpu_triton")  # a third of a second, of no use to a CPU
    outputs, inputs, groups = *codes.shape, scales.shape[1]
    devices = 1 if mesh.empty else mesh.size
    if has_whole_inputs:
        outputs //= devices
    else:
        inputs, groups = inputs // devices, max(1, groups // devices)
    # An absent GPU has no number: this machine's own device is another kind then, and has none either.
    capability = getattr(jax.devices()[0], "compute_capability", None)
    reason = module.unsupported(x.dtype, outputs, inputs, groups, None if capability is None else float(capability))
    if reason is not None:
        _say(reason)
        return None
    kernel: Kernel = functools.partial(module.quantized_matmul, interpret=False)
    return kernel if devices == 1 else on_mesh(kernel, mesh, has_whole_inputs=has_whole_inputs)


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
