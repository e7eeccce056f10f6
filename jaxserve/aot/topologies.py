"""Describes absent TPU slices and GPUs to their real compilers; knows nothing of what is compiled for them."""

import os
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One kind of accelerator, from its maker's data sheet.

    Attributes:
      hbm_bytes: of one device (a TPU chip or a GPU).
      hbm_bytes_per_s: peak.
      reserved_bytes: TPU only, what the runtime keeps of each chip for itself. An assumption: no chip was at hand to
        ask, and the compiler admits a little more (16.0 GiB on v5e, 31.5 on v6e).
      smallest: the smallest slice that the TPU compiler describes; "" on GPU, where one device is.
      compute_capability: NVIDIA only.
      description: NVIDIA only, the compiler's own description of the device as a text protobuf; see `_gpu_description`.
    """

    platform: Literal["tpu", "cuda"]
    hbm_bytes: int
    hbm_bytes_per_s: float
    reserved_bytes: int = 0
    smallest: str = ""
    compute_capability: str = ""
    description: str = ""

    @property
    def usable_bytes(self) -> int:
        """What jax gives a process by default: all but the runtime's own on TPU, three quarters on GPU."""
        if self.platform == "tpu":
            return self.hbm_bytes - self.reserved_bytes
        return int(self.hbm_bytes * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")))


def _gpu_description(
    name: str,
    capability: tuple[int, int],
    features: str,
    *,
    cores: int,
    fpus_per_core: int,
    shared_per_core: int,
    shared_per_block: int,
    l2_bytes: int,
    hbm_bytes: int,
    hbm_bytes_per_s: float,
    clock_ghz: float,
) -> str:
    """XLA's GpuTargetConfigProto (xla/stream_executor/device_description.proto), as far as the compiler reads it."""
    return f"""
        platform_name: "CUDA"
        device_description_str: "{name}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
          name: "{name}"
          device_vendor: "NVIDIA Corporation"
          cuda_compute_capability {{
            major: {capability[0]} minor: {capability[1]} feature_extension: {features}
          }}
          core_count: {cores}
          fpus_per_core: {fpus_per_core}
          clock_rate_ghz: {clock_ghz}
          device_memory_size: {hbm_bytes}
          memory_bandwidth: {int(hbm_bytes_per_s)}
          l2_cache_size: {l2_bytes}
          shared_memory_per_core: {shared_per_core}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {shared_per_block}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          device_address_bits: 64
          ecc_enabled: true
          driver_version: "12.8.0"
          runtime_version: "12.8.0"
          compile_time_toolkit_version: "12.8.0"
          dnn_version: "9.10.0"
        }}"""


GIB = 1 << 30

ACCELERATORS = {
    "v5e": Accelerator(
        platform="tpu", hbm_bytes=16 * GIB, reserved_bytes=GIB // 4, hbm_bytes_per_s=819e9, smallest="2x2"
    ),
    "v6e": Accelerator(
        platform="tpu", hbm_bytes=32 * GIB, reserved_bytes=3 * GIB // 4, hbm_bytes_per_s=1640e9, smallest="2x2"
    ),
    "v5p": Accelerator(platform="tpu", hbm_bytes=95 * GIB, hbm_bytes_per_s=2765e9, smallest="2x2x1"),
    "h200": Accelerator(
        platform="cuda",
        hbm_bytes=141 * GIB,
        hbm_bytes_per_s=4.8e12,
        compute_capability="9.0",
        description=_gpu_description(
            "NVIDIA H200",
            (9, 0),
            "ACCELERATED_FEATURES",
            cores=132,
            fpus_per_core=128,
            shared_per_core=233472,
            shared_per_block=232448,
            l2_bytes=50 << 20,
            hbm_bytes=141 * GIB,
            hbm_bytes_per_s=4.8e12,
            clock_ghz=1.98,
        ),
    ),
    "a100": Accelerator(
        platform="cuda",
        hbm_bytes=80 * GIB,
        hbm_bytes_per_s=2.039e12,
        compute_capability="8.0",
        description=_gpu_description(
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            "NONE",
            cores=108,
            fpus_per_core=64,
            shared_per_core=167936,
            shared_per_block=166912,
            l2_bytes=40 << 20,
            hbm_bytes=80 * GIB,
            hbm_bytes_per_s=2.039e12,
            clock_ghz=1.41,
        ),
    ),
    "b200": Accelerator(
        platform="cuda",
        hbm_bytes=178 * GIB,
        hbm_bytes_per_s=8e12,
        compute_capability="10.0",
        description=_gpu_description(
            "NVIDIA B200",
            (10, 0),
            "ACCELERATED_FEATURES",
            cores=148,
            fpus_per_core=128,
            shared_per_core=233472,
            shared_per_block=232448,
            l2_bytes=126 << 20,
            hbm_bytes=178 * GIB,
            hbm_bytes_per_s=8e12,
            clock_ghz=1.965,
        ),
    ),
}

# What libtpu asks the metadata server of a TPU machine; answered here, or it waits for a server that is not there.
_TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so several processes may compile
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def accelerator(name: str) -> Accelerator:
    """The kind of `v5e:2x4` or `h200:8`; ConfigError where it is unknown."""
    kind = name.partition(":")[0]
    if kind not in ACCELERATORS:
        raise ConfigError(
            f"topology {name!r} is unknown; known kinds are {', '.join(ACCELERATORS)}, e.g. v5e:2x4, h200:8"
        )
    return ACCELERATORS[kind]


def absent_devices(name: str) -> list[jax.Device]:
    """Devices that programs can be compiled for, though they are not there.

    The process should run with JAX_PLATFORMS=cpu, or jax looks for the hardware. A process compiles for TPUs or GPUs of
    one kind at a time: kernels keep what they learnt of the device.

    Args:
      name: a TPU slice such as `v5e:2x4` or `v5p:2x2x1`, or GPUs of one machine, `h200` or `h200:8`. A kind of TPU
        alone means its smallest slice (4 chips): take the first devices of it for fewer.

    Raises:
      ConfigError: the name is unknown, or the compiler is not installed; the message says what to install.
    """
    kind, _, size = name.partition(":")
    found = accelerator(name)
    if found.platform == "tpu":
        for variable, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        try:
            topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{size or found.smallest}")
        except RuntimeError as error:
            if "not installed" in str(error):
                raise ConfigError(
                    f"compiling for {name} needs libtpu, which is not installed: "
                    f"pip install 'jax[tpu]=={jax.__version__}', "
                    "best in an environment of its own (JAX looks for a TPU wherever libtpu is)"
                ) from error
            raise ConfigError(f"the TPU compiler refuses the topology {name!r}: {error}") from error
    else:
        if size and not size.isdecimal():
            raise ConfigError(f"topology {name!r}: a GPU's size is a number of devices, e.g. {kind}:8")
        try:
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name=kind, target_config=found.description, topology=f"1x1x{size or 1}"
            )
        except NotImplementedError as error:
            raise ConfigError(
                f"compiling for {name} needs jax's CUDA plugin, which is not installed: pip install "
                f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12 "
                "nvidia-cuda-runtime-cu12, best in an environment of its own"
            ) from error
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"the GPU compiler refuses the topology {name!r}: {error}") from error
    return list(topology.devices)


def absent_mesh(name: str, axes: dict[str, int]) -> Mesh:
    """A mesh over the first devices of an absent slice, e.g. `absent_mesh("v5e:2x4", {"tensor": 8})`.

    Arguments are `ShapeDtypeStruct`s with a `NamedSharding` of this mesh; lower under
    `jax.sharding.use_abstract_mesh(mesh.abstract_mesh)`, by which kernels learn their device's kind.
    """
    devices = absent_devices(name)
    count = int(np.prod(list(axes.values())))
    if count > len(devices):
        raise ConfigError(f"mesh {axes} needs {count} devices; {name} has {len(devices)}")
    return Mesh(np.array(devices[:count]).reshape(tuple(axes.values())), tuple(axes))
