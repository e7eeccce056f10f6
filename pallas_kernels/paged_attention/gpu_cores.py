"""What Hopper and Blackwell have of their own: tensor cores, and shared memory in their tiles; knows no attention."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COPY_ROWS = 8  # rows of a tile of shared memory, hence of the smallest copy
BLACKWELL = ("B100", "B200", "B300")  # an absent device has a name, and no compute capability
# jax 0.10 asks for an index.
_WHOLE: dict[str, Any] = {"idx": ()} if "idx" in inspect.signature(plgpu.load).parameters else {}
Ref = Any  # jax gives the types of references no public name


class Wgmma:
    """Hopper's tensor cores: a warpgroup multiplies, and has the product in its registers."""

    tile_rows = 64
    layout = plgpu.Layout.WGMMA
    chunk = 128  # columns of a product handled at once

    @staticmethod
    def scratch(columns: int, warpgroups: int) -> tuple[Any, ...]:
        return ()

    @staticmethod
    def product(a: Ref, b: Ref, warpgroup: int, scratch: tuple[Ref, ...]) -> Callable[[int, int], Array]:
        def multiply(columns: Ref) -> Callable[[Ref], Array]:
            def into(result: Ref) -> Array:
                plgpu.wgmma(result, a, columns)
                product: Array = result[...]
                return product

            return into

        def part(first: int, columns: int) -> Array:
            own = b if columns == b.shape[1] else b.at[:, pl.ds(first, columns)]
            out: Array = pl.run_scoped(multiply(own), plgpu.WGMMAAccumulatorRef((a.shape[0], columns), jnp.float32))
            return out

        return part


class Tcgen05:
    """Blackwell's: one thread starts the product, which lands in tensor memory."""

    tile_rows = 128
    layout = plgpu.Layout.TCGEN05
    chunk = 32  # or registers spill, of which a row of 128 takes one a column

    @staticmethod
    def scratch(columns: int, warpgroups: int) -> tuple[Any, ...]:
        return (
            [plgpu.TMEM((Tcgen05.tile_rows, columns), jnp.float32)] * warpgroups,
            plgpu.Barrier(num_barriers=warpgroups, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=warpgroups, orders_tensor_core=True),
        )

    @staticmethod
    def product(a: Ref, b: Ref, warpgroup: int, scratch: tuple[Ref, ...]) -> Callable[[int, int], Array]:
        memories, multiplied, loaded = scratch
        result = memories[warpgroup].at[:, pl.ds(0, b.shape[1])]
        # All warps have loaded the product before this one, or this one would overwrite it.
        plgpu.barrier_arrive(loaded.at[warpgroup])
        plgpu.barrier_wait(loaded.at[warpgroup])
        plgpu.tcgen05_mma(result, a, b, multiplied.at[warpgroup], accumulate=False)
        plgpu.barrier_wait(multiplied.at[warpgroup])

        def part(first: int, columns: int) -> Array:
            product: Array = plgpu.async_load_tmem(result.at[:, pl.ds(first, columns)])
            plgpu.wait_load_tmem()
            return product

        return part


TensorCore = type[Wgmma] | type[Tcgen05]


def tensor_core() -> TensorCore:
    """That of the device compiled for; Hopper's where there is none, in simulation."""
    device: Any = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    if hasattr(device, "compute_capability"):
        return Tcgen05 if float(device.compute_capability) >= 10 else Wgmma
    return Tcgen05 if any(name in device.device_kind for name in BLACKWELL) else Wgmma


def swizzle(columns: int, dtype: Any) -> int:
    """The widest, in bytes, that divides so many columns."""
    return next(s for s in (128, 64, 32) if columns * jnp.dtype(dtype).itemsize % s == 0)


def tiled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Shared memory in the tiles that TMA writes and tensor cores read, which divide so many columns."""
    width = swizzle(columns, dtype)
    tile = (COPY_ROWS, width // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(width)))


def load(ref: Ref, layout: Any) -> Array:
    """All of a reference into registers, dealt out to the threads as the layout says."""
    values: Array = plgpu.load(ref, **_WHOLE, layout=layout)
    return values
