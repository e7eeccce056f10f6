"""Whether a kernel of ours multiplies with a narrow matrix on the device that holds it; knows arrays, no model."""

import functools
import logging
from collections.abc import Callable
from importlib import import_module

import jax
import jax.numpy as jnp
from jax import Array

log = logging.getLogger(__name__)

Kernel = Callable[[Array, Array, Array, Array | None], Array]  # x, codes, scales, zeros: see `gpu_triton`
MOST_TOKENS = 256  # see `find_kernel`


def find_kernel(x: Array, codes: Array, scales: Array) -> Kernel | None:
    """What multiplies 4-bit weights faster than XLA, which widens them to memory first; None: XLA does.

    For a GPU alone, where XLA's way moves seven times the bytes. With many tokens it is the tensor cores that take the
    time, and a kernel that widens each weight again for every tile of tokens keeps them waiting: those XLA multiplies.
    A matrix that the kernel cannot take is named once.

    Args:
      x: [tokens, inputs]; codes: [outputs, inputs]; scales: [outputs, groups]. Read for their types alone: they may be
        traced, and know the mesh that they are on.
    """
    mesh = jax.typeof(codes).sharding.mesh  # empty where nothing was said
    device = mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if codes.dtype != jnp.int4 or platform != "gpu" or x.shape[0] > MOST_TOKENS:
        return None
    module = import_module("pallas_kernels.quantized_matmul.gpu_triton")  # a third of a second, of no use to a CPU
    if not mesh.empty and mesh.size > 1:
        reason: str | None = f"{mesh.size} devices share them"
    else:
        reason = module.unsupported(x.dtype, *codes.shape, scales.shape[1])
    if reason is not None:
        _say(reason)
        return None
    kernel: Kernel = functools.partial(module.quantized_matmul, interpret=False)
    return kernel


@functools.cache
def _say(reason: str) -> None:
    """Once for each reason: a model asks for each of its matrices."""
    log.warning("4-bit weights are widened in memory before they are multiplied: %s", reason)
