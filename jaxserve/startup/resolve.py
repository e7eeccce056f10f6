"""Turns every "auto" of a configuration into a number, from the model's shape and the device; decides nothing later."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp

from jaxserve.config import Dtype, EngineConfig, ExecutionSection, SchedulerSection
from jaxserve.device.buckets import doublings
from jaxserve.errors import ConfigError
from models.config import ModelConfig, Quantization
from models.partition import Partition
from models.quantization import CODE_DTYPES, group_count, matrix_shapes
from models.step import KVPool
from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.paged_attention import (
    AttentionShape,
    Backend,
    BackendName,
    backend_module,
    candidates,
    choose_backend,
)
from pallas_kernels.quantized_matmul import MatmulBackend, unsupported_by_gpu
from pallas_kernels.quantized_matmul import cpu as cpu_matmul

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

MAX_MODEL_LEN = 8192  # of "auto": longer contexts cost block-table width, so they are asked for
# Each program costs seconds of start, each idle row a share of a step. One decode row deserves a program of its own
# (a lone user); between that and 8 the step hardly grows. A prompt shorter than 2 blocks runs in 2.
FEWEST_DECODE_ROWS = 8
FEWEST_PREFILL_BLOCKS = 2
# Of "auto", the smallest that serves: small pages share more of a prefix and leave less of a last page empty.
PAGE_SIZES = (16, 32, 64, 128)

log = logging.getLogger(__name__)

# Formats with so few digits that a model's keys need frames (docs/quantization.md).
FRAMED_KEYS: tuple[KVDtype, ...] = ("int4", "fp8_e5m2")


def resolve(config: ConfigT, model: ModelConfig, device: jax.Device, *, weight_bytes: int, free_bytes: int) -> ConfigT:
    """Returns a configuration of the same class without any "auto".

    Args:
      model: as the checkpoint has it, but quantized (`quantized_model`).
      device: any of those that share the model.
      weight_bytes: what the weights will take on each device; they are not there yet.
      free_bytes: of each device.

    Raises:
      ConfigError: what was asked for contradicts itself or does not fit the model or the device.
    """
    on_cpu = device.platform == "cpu"
    dtype = weight_dtype(config, device)
    cache_dtype: KVDtype = config.cache.dtype if config.cache.dtype != "auto" else "float32" if on_cpu else dtype
    scheduler = _scheduler(config, on_cpu)
    execution = _execution(config, scheduler, on_cpu)
    max_model_len = _max_model_len(config, model)

    page_size = config.cache.page_size
    if page_size == "auto":
        assert execution.block_q != "auto"
        shape = _attention_shape(
            model,
            device,
            tensor=config.mesh.tensor,
            page_size=PAGE_SIZES[0],
            block_q=execution.block_q,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        page_size = _page_size(execution.attention_backend, shape)
    memory_fraction = config.cache.memory_fraction
    if memory_fraction == "auto":
        memory_fraction = 0.1 if on_cpu else 0.85
    num_pages = config.cache.num_pages
    if num_pages == "auto":
        split = Partition(model=model, tensor=config.mesh.tensor).split_model()
        page_bytes = KVPool.page_bytes(split, page_size, cache_dtype) // config.mesh.tensor
        budget = max(0, free_bytes - weight_bytes) * memory_fraction
        useful = scheduler.max_num_seqs * -(-max_model_len // page_size)
        num_pages = 1 + min(round_down(int(budget // page_bytes)), useful)  # and the dummy page
        fitting = (num_pages - 1) * page_size
        if fitting < max_model_len:
            if config.model.max_model_len != "auto" or fitting == 0:
                raise ConfigError(
                    f"the cache holds {fitting} tokens, {budget / 2**20:.0f} MiB of pages, but model.max_model_len is "
                    f"{max_model_len}; lower it, or raise cache.memory_fraction ({memory_fraction})"
                )
            max_model_len = fitting
    elif num_pages < 2:
        raise ConfigError(f"cache.num_pages is {num_pages}; at least 2 are needed: a dummy page and one to use")

    if config.cache.host_pages and not config.cache.prefix_caching:
        raise ConfigError(
            f"cache.host_pages is {config.cache.host_pages}, but without cache.prefix_caching no page is kept"
        )

    name = Path(config.model.path).name if config.model.name == "auto" else config.model.name
    resolved = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={
                    "name": name,
                    "dtype": dtype,
                    "max_model_len": max_model_len,
                    "quantization": "none" if model.quantization is None else model.quantization.format,
                }
            ),
            "cache": config.cache.model_copy(
                update={
                    "page_size": page_size,
                    "num_pages": num_pages,
                    "memory_fraction": memory_fraction,
                    "dtype": cache_dtype,
                }
            ),
            "scheduler": scheduler,
            "execution": execution,
        }
    )
    backends = {
        "attention_backend": attention_backend(resolved, model, device).name,
        "matmul_backend": matmul_backend(resolved, model, device),
    }
    return resolved.model_copy(update={"execution": execution.model_copy(update=backends)})


def quantized_model(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with its matrices stored as the configuration wants them. Raises ConfigError.

    Args:
      model: as the checkpoint has it, or what this function returned.
    """
    wanted, stored = config.model.quantization, model.quantization
    if wanted == "auto" or (stored is not None and wanted == stored.format) or (stored is None and wanted == "none"):
        return model
    if stored is not None or wanted == "none":
        assert stored is not None
        raise ConfigError(
            f"model.quantization is {wanted}, but {config.model.path} is quantized already, as {stored.format}; "
            f"set it to auto, or give a checkpoint that is not"
        )
    quantization = Quantization.made_at_load(
        wanted, group_size=config.model.quantization_group_size, embeddings=config.model.quantize_embeddings
    )
    return dataclasses.replace(model, quantization=quantization)


def framed_model(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with frames for its keys where the pages' format, no longer "auto", has few digits."""
    return dataclasses.replace(model, has_key_frames=config.cache.dtype in FRAMED_KEYS)


def attention_backend(config: EngineConfig, model: ModelConfig, device: jax.Device) -> Backend:
    """Who computes attention for a configuration in which only this may still be "auto". Raises ConfigError.

    Args:
      model: as the checkpoint has it.
    """
    assert isinstance(config.cache.page_size, int)
    assert isinstance(config.execution.block_q, int)
    assert config.cache.dtype != "auto"
    shape = _attention_shape(
        model,
        device,
        tensor=config.mesh.tensor,
        page_size=config.cache.page_size,
        block_q=config.execution.block_q,
        dtype=config.model.dtype,
        cache_dtype=config.cache.dtype,
    )
    try:
        return choose_backend(config.execution.attention_backend, shape, library_folder=_library_folder(config))
    except ValueError as error:
        raise ConfigError(
            f"execution.attention_backend is {config.execution.attention_backend}, cache.dtype {config.cache.dtype}: "
            f"{error}; xla serves everything, and auto takes it where no kernel can"
        ) from None


def matmul_backend(config: EngineConfig, model: ModelConfig, device: jax.Device) -> MatmulBackend:
    """Who multiplies with quantized matrices, for a configuration in which only this may still be "auto".

    Args:
      model: with its matrices as they are stored here (`quantized_model`).

    Raises:
      ConfigError: a kernel was asked for by name and cannot.
    """
    asked, quantization = config.execution.matmul_backend, model.quantization
    if asked == "xla" or (asked == "auto" and quantization is None):
        return "xla"
    if quantization is None:
        raise ConfigError(
            f"execution.matmul_backend is {asked}, but no matrix is quantized; auto and xla serve such a model, or set "
            f"model.quantization to int4"
        )
    kernel = _own_matmul(device, quantization) if asked == "auto" else asked
    if kernel == "xla":
        return "xla"
    refusal = (_cpu_refusal if kernel == "cpu" else _gpu_refusal)(config, model, quantization, device)
    if refusal is None:
        return kernel
    if asked != "auto":
        raise ConfigError(
            f"execution.matmul_backend is {asked}, model.quantization {quantization.format}: {refusal}; "
            f"xla multiplies everything, and auto takes it where no kernel can"
        )
    log.warning("matmul backend %s is passed over for xla, %s: %s", kernel, _XLA_INSTEAD[kernel], refusal)
    return "xla"


_XLA_INSTEAD: Mapping[MatmulBackend, str] = {
    "cpu": "which is slower, and rounds activations otherwise, so that answers differ a little",
    "gpu_triton": "which widens the weights in memory first",
}


def _own_matmul(device: jax.Device, quantization: Quantization) -> MatmulBackend:
    """The kernel for such a device; XLA where its own way is as good."""
    if device.platform == "cpu":
        return "cpu"
    return "gpu_triton" if device.platform == "gpu" and quantization.format == "int4" else "xla"


def _cpu_refusal(
    config: EngineConfig, model: ModelConfig, quantization: Quantization, device: jax.Device
) -> str | None:
    if device.platform != "cpu":
        return f"it is for CPUs, and the device is a {device.platform}"
    if config.mesh.tensor > 1:
        return f"it is for whole matrices, and {config.mesh.tensor} devices (mesh.tensor) share them"
    for _, features_in in matrix_shapes(model, 1).values():
        refusal = cpu_matmul.unsupported(
            code_dtype=str(jnp.dtype(CODE_DTYPES[quantization.format])),
            scale_dtype=config.model.dtype,
            group_size=quantization.group_size,
            features_in=features_in,
        )
        if refusal is not None:
            return refusal
    return cpu_matmul.prepare(_library_folder(config))


def _gpu_refusal(
    config: EngineConfig, model: ModelConfig, quantization: Quantization, device: jax.Device
) -> str | None:
    if device.platform != "gpu":
        return f"it is for GPUs, and the device is a {device.platform}"
    split = Partition(model=model, tensor=config.mesh.tensor).split_model()
    shapes = matrix_shapes(split, config.mesh.tensor).values()
    capability = getattr(device, "compute_capability", None)  # a GPU that is only compiled for may not know it
    return unsupported_by_gpu(
        ((outputs, inputs, max(1, group_count(quantization, inputs))) for outputs, inputs in shapes),
        code_dtype=CODE_DTYPES[quantization.format],
        dtype=activation_dtype(jnp.dtype(config.model.dtype), device.platform),
        compute_capability=None if capability is None else float(capability),
    )


def _library_folder(config: EngineConfig) -> Path | None:
    """Where kernels in C are kept."""
    cache = config.execution.compilation_cache
    assert cache != "auto"
    return None if cache is None else Path(cache) / "native"


def _page_size(requested: BackendName | Literal["auto"], shape: AttentionShape) -> int:
    """The smallest page with which the fastest backend that can serve this model does."""
    for name in candidates(requested, shape):
        refusals: list[str] = []
        for page_size in PAGE_SIZES:
            refusal = backend_module(name).unsupported(dataclasses.replace(shape, page_size=page_size))
            if refusal is None:
                if refusals:
                    log.info("cache.page_size auto is %d, for attention backend %s: %s", page_size, name, refusals[-1])
                return page_size
            refusals.append(refusal)
    return PAGE_SIZES[0]  # one that was asked for by name and can serve none, which is refused later


def _attention_shape(
    model: ModelConfig,
    device: jax.Device,
    *,
    tensor: int,
    page_size: int,
    block_q: int,
    dtype: str,
    cache_dtype: KVDtype,
) -> AttentionShape:
    """What one device of the mesh has to attend to. model: as the checkpoint has it."""
    split = Partition(model=model, tensor=tensor).split_model()
    return AttentionShape(
        heads=split.num_heads // tensor,
        kv_heads=split.num_kv_heads // tensor,
        head_dim=model.head_dim,
        page_size=page_size,
        block_q=block_q,
        dtype=str(activation_dtype(jnp.dtype(dtype), device.platform)),
        kv_dtype=cache_dtype,
        platform=device.platform,
        compute_capability=float(getattr(device, "compute_capability", 0)),
    )


def weight_dtype(config: EngineConfig, device: jax.Device) -> Dtype:
    """Of the parameters, "auto" resolved."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device.platform == "cpu" else "bfloat16"


def activation_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """Of what lies between the matrices: as the weights, but float32 on the CPU, which has no narrow arithmetic other
    than products."""
    return jnp.dtype("float32") if platform == "cpu" else dtype


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position
    wanted = config.model.max_model_len
    if wanted == "auto":
        return min(limit, MAX_MODEL_LEN)
    if wanted > limit:
        raise ConfigError(f"model.max_model_len is {wanted}; the model was made for at most {limit} tokens")
    if wanted < 2:
        raise ConfigError(f"model.max_model_len is {wanted}; a prompt token and an output token need at least 2")
    return wanted


def _scheduler(config: EngineConfig, on_cpu: bool) -> SchedulerSection:
    budget = config.scheduler.max_num_batched_tokens
    if budget == "auto":
        budget = config.scheduler.max_num_seqs + (512 if on_cpu else 2048)
    return config.scheduler.model_copy(update={"max_num_batched_tokens": budget})


def _execution(config: EngineConfig, scheduler: SchedulerSection, on_cpu: bool) -> ExecutionSection:
    assert scheduler.max_num_batched_tokens != "auto"
    execution = config.execution
    max_num_seqs = scheduler.max_num_seqs
    block_q = execution.block_q
    if block_q == "auto":
        block_q = 32 if on_cpu else 64
    spare = scheduler.max_num_batched_tokens - max_num_seqs
    if spare < block_q:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {scheduler.max_num_batched_tokens}; with max_num_seqs {max_num_seqs} "
            f"and execution.block_q {block_q} it must be at least {max_num_seqs + block_q}, or no prompt could run"
        )
    decode_buckets = execution.decode_buckets
    if decode_buckets == "auto":
        decode_buckets = (1, *doublings(FEWEST_DECODE_ROWS, max_num_seqs))
    if max(decode_buckets, default=0) != max_num_seqs:
        raise ConfigError(
            f"execution.decode_buckets is {list(decode_buckets)}; the largest must be max_num_seqs, {max_num_seqs}"
        )
    prefill_buckets = execution.prefill_buckets
    if prefill_buckets == "auto":
        prefill_buckets = doublings(FEWEST_PREFILL_BLOCKS, spare // block_q)
    if not prefill_buckets:
        raise ConfigError("execution.prefill_buckets is empty; no prompt could run")
    cache = execution.compilation_cache
    return execution.model_copy(
        update={
            "block_q": block_q,
            "decode_buckets": tuple(sorted(set(decode_buckets))),
            "prefill_buckets": tuple(sorted(set(prefill_buckets))),
            "compilation_cache": str(user_cache_folder() / "programs") if cache == "auto" else cache,
        }
    )


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/jaxserve`, by default `~/.cache/jaxserve` (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve"


def round_down(count: int) -> int:
    """Keeps the seven highest bits. The number of pages is part of every program's shape, and a start that finds a
    little less memory than the last one should still find its programs."""
    unit = 1 << max(0, count.bit_length() - 7)
    return count // unit * unit


def free_memory(device: jax.Device) -> int:
    """Bytes that the device could still give; on the CPU what the system calls available, in steps of a quarter.

    The steps are coarse because what else runs must not change the number of pages, and with it every program's shape.
    """
    stats = device.memory_stats()
    if stats is not None:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    page_size = os.sysconf("SC_PAGE_SIZE")
    available = os.sysconf("SC_AVPHYS_PAGES") * page_size
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    step = os.sysconf("SC_PHYS_PAGES") * page_size
    while step > available:
        step = step * 3 // 4
    return step
