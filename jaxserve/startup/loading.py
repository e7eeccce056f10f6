"""From a configuration to a ready engine: weights read, programs compiled; what happens once, at the start."""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.compilations import COMPILATIONS
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import step_shapes
from jaxserve.device.programs import Params, ProgramSpec
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.sharding import bytes_per_device, parameter_sharding, tensor_mesh
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.pooling import stated_pooling
from jaxserve.simulation.step_times import StepTimes
from jaxserve.startup.key_frames import measure_key_frames
from jaxserve.startup.resolve import (
    activation_dtype,
    attention_backend,
    framed_model,
    free_memory,
    matmul_backend,
    quantized_model,
    resolve,
    weight_dtype,
)
from jaxserve.startup.start import add_the_rest, load_programs, write_bundle
from models.checkpoint import Checkpoint, open_checkpoint, resolve_model
from models.config import ModelConfig
from models.key_frame import NAME
from models.llama import Llama
from models.partition import Partition, Spread
from models.quantization import check_groups
from models.registry import module_for
from models.step import KVPool
from pallas_kernels.quantized_matmul import MatmulBackend

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

Progress = Callable[[str, int, int], None]  # what, done, total


class Vocabulary(Protocol):
    """What the engine must know of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def load_engine(config: EngineConfig, vocabulary: Vocabulary, *, progress: Progress | None = None) -> Engine:
    """Reads the weights, compiles every program meanwhile, and returns an engine that will not compile again.

    Args:
      config: any "auto" in it is resolved here; `engine.config` has the result.
      progress: called with ("programs", done, total) from this thread.

    Raises:
      ConfigError, ModelError: before any weight is read, where the configuration or the checkpoint shows it.
    """
    step_times = None if config.scheduler.step_times is None else StepTimes.read(Path(config.scheduler.step_times))
    with _collector_off():
        checkpoint, config, spec = _prepare(config, vocabulary)
        _check_host_memory(config, spec)
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
            weights = reader.submit(_timed_load, checkpoint, spec)
            programs, obtain = load_programs(config.execution, spec, partial(_count_programs, progress))
            params = weights.result()
        runner = DeviceRunner(spec, programs, params, host_pages=config.cache.host_pages)
        # What exists now lives as long as the engine; the collector need not look at it in every pass.
        gc.collect()
        gc.freeze()
    if len(programs.steps) < len(spec.shapes):
        add_the_rest(spec, programs, obtain)
    else:
        COMPILATIONS.mark_ready()
    return Engine(
        config,
        spec.model,
        runner,
        num_token_ids=vocabulary.vocab_size,
        eos_token_ids=frozenset(spec.model.eos_token_ids) | frozenset(vocabulary.eos_token_ids),
        step_times=step_times,
    )


@contextmanager
def _collector_off() -> Iterator[None]:
    """A start makes little garbage and many objects that stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def compile_bundle(
    config: EngineConfig, vocabulary: Vocabulary, folder: Path, *, progress: Progress | None = None
) -> int:
    """Compiles every program into a bundle that a start with the same configuration can use; reads no weight.

    Returns:
      how many programs the bundle has.

    Raises:
      ConfigError, ModelError.
    """
    _, _, spec = _prepare(config, vocabulary)
    return write_bundle(folder, spec, partial(_count_programs, progress))


def load_model(config: ConfigT, vocabulary: Vocabulary) -> tuple[ConfigT, ProgramSpec, Params]:
    """The weights, and what would be compiled for them: the configuration without "auto", the spec, the parameters.

    Raises:
      ConfigError, ModelError.
    """
    checkpoint, config, spec = _prepare(config, vocabulary)
    return config, spec, _timed_load(checkpoint, spec)


def _prepare(config: ConfigT, vocabulary: Vocabulary) -> tuple[Checkpoint, ConfigT, ProgramSpec]:
    """The opened checkpoint, the configuration without "auto" and what it compiles. Raises ConfigError, ModelError."""
    checkpoint = open_checkpoint(resolve_model(config.model.path))
    model = checkpoint.config
    if vocabulary.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{checkpoint.path}: the tokenizer has {vocabulary.vocab_size} token ids, the model only {model.vocab_size}"
        )
    mesh = tensor_mesh(config.mesh.tensor, jax.devices())
    config = resolve_for(config, model, mesh=mesh)
    return checkpoint, config, program_spec(config, model, vocabulary.vocab_size, mesh)


def _check_host_memory(config: EngineConfig, spec: ProgramSpec) -> None:
    """Raises ConfigError if this machine could never hold the pages that are to be kept in its memory."""
    if not config.cache.host_pages:
        return
    page_bytes = KVPool.page_bytes(spec.model, spec.page_size, spec.kv_dtype)
    wanted = config.cache.host_pages * page_bytes
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > memory:
        raise ConfigError(
            f"cache.host_pages is {config.cache.host_pages}, {wanted / 2**30:.1f} GiB; this machine has "
            f"{memory / 2**30:.1f} GiB, room for {memory // page_bytes} pages and nothing else"
        )
    log.info("host memory for %d evicted pages: %.2f GiB", config.cache.host_pages, wanted / 2**30)


def _timed_load(checkpoint: Checkpoint, spec: ProgramSpec) -> Params:
    start = time.perf_counter()
    params = load_params(checkpoint, spec.params, spec.mesh)
    log.info("weights read in %.1f s", time.perf_counter() - start)
    return measure_key_frames(spec, params) if spec.model.has_key_frames else params


def _count_programs(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress("programs", done, total)


def resolve_for(
    config: ConfigT, model: ModelConfig, *, mesh: Mesh | None = None, free_bytes: int | None = None
) -> ConfigT:
    """The configuration without any "auto", for this model. Raises ConfigError.

    Args:
      mesh: None takes as many of this process's devices as the configuration says.
      free_bytes: of each device; None asks the devices.
    """
    if config.model.pooling == "auto":
        pooling = stated_pooling(resolve_model(config.model.path))
        config = config.model_copy(update={"model": config.model.model_copy(update={"pooling": pooling})})
    model = quantized_model(config, model)
    if mesh is None:
        mesh = tensor_mesh(config.mesh.tensor, jax.devices())
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    dtype = weight_dtype(config, device)
    _, params = split_parameters(model, jnp.dtype(dtype), mesh)
    if free_bytes is None:
        free_bytes = min(map(free_memory, mesh.devices.flat))
        if on_cpu:  # the devices share one memory
            free_bytes //= mesh.size
    weight_bytes = bytes_per_device(jax.tree.leaves(params))
    return resolve(config, model, device, weight_bytes=weight_bytes, free_bytes=free_bytes)


def split_parameters(
    model: ModelConfig, dtype: jnp.dtype, mesh: Mesh, matmul: MatmulBackend = "xla"
) -> tuple[nnx.GraphDef[Llama], Params]:
    """The module and its parameters as shapes with shardings, in the form that is split over the mesh."""
    split = Partition(model=model, tensor=mesh.size).split_model()
    check_groups(split, mesh.size)
    activations = activation_dtype(dtype, mesh.devices.flat[0].platform)
    graph, params = nnx.split(module_for(split)(split, dtype, activations, matmul))

    def with_sharding(path: Any, param: Any) -> Any:
        struct, sharding = param.get_value(), parameter_sharding(mesh, param.get_metadata("axes"))
        return param.replace(jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding))

    return graph, nnx.map_state(with_sharding, params)


def program_spec(config: EngineConfig, model: ModelConfig, num_token_ids: int, mesh: Mesh) -> ProgramSpec:
    """What a resolved configuration compiles.

    Args:
      model: as the checkpoint has it; the spec's is its split form.
    """
    assert isinstance(config.model.max_model_len, int)
    assert isinstance(config.cache.page_size, int)
    assert isinstance(config.cache.num_pages, int)
    assert isinstance(config.execution.block_q, int)
    assert config.execution.decode_buckets != "auto"
    assert config.execution.prefill_buckets != "auto"
    assert config.cache.dtype != "auto"
    model = framed_model(config, quantized_model(config, model))
    matmul = matmul_backend(config, model, mesh.devices.flat[0])
    graph, params = split_parameters(model, jnp.dtype(config.model.dtype), mesh, matmul)
    return ProgramSpec(
        model=Partition(model=model, tensor=mesh.size).split_model(),
        graph=graph,
        params=params,
        mesh=mesh,
        backend=attention_backend(config, model, mesh.devices.flat[0]),
        matmul_backend=matmul,
        shapes=step_shapes(config.execution.decode_buckets, config.execution.prefill_buckets),
        max_num_seqs=config.scheduler.max_num_seqs,
        pages_per_seq=-(-config.model.max_model_len // config.cache.page_size),
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        block_q=config.execution.block_q,
        kv_dtype=config.cache.dtype,
        num_token_ids=num_token_ids,
        has_host_tier=config.cache.host_pages > 0,
    )


def load_params(checkpoint: Checkpoint, structs: Params, mesh: Mesh) -> Params:
    """The checkpoint's parameters in place of `structs`, every one once, and of each a device gets its own part.

    Frames of keys are in no checkpoint, and not in what is returned.
    """
    partition = Partition(model=checkpoint.config, tensor=mesh.size)
    flat = [(path, param) for path, param in nnx.to_flat_state(structs) if NAME not in path]
    expected = {_dotted(path): param.get_value() for path, param in flat}
    spreads = {_dotted(path): partition.spread(param.get_metadata("axes")) for path, param in flat}
    by_group = _group_spreads(spreads, expected, mesh)
    if checkpoint.config.quantization is not None:
        spreads |= by_group
    loaded = checkpoint.load(expected, {name: spread for name, spread in spreads.items() if spread is not None})
    if mesh.devices.flat[0].platform == "cpu":
        loaded = {name: _acceptable(array) if array.dtype == jnp.int4 else array for name, array in loaded.items()}
    return nnx.from_flat_state([(path, param.replace(loaded[_dotted(path)])) for path, param in flat])


def _acceptable(array: jax.Array) -> jax.Array:
    """The same numbers, where jax 0.10 needs it bound to no device: it says of a CPU's int4 arrays that they have 8
    bits a number and of its programs that they want 4, and refuses the call wherever it compares the two, which it does
    for bound arrays. On a mesh every call then sends the devices their parts, which only a simulation can afford."""
    layout = array.format.layout  # type: ignore[attr-defined]  # jax types it on its own arrays only
    is_told_as_it_is = layout is not None and layout.sub_byte_element_size_in_bits == 4
    return array if is_told_as_it_is else jnp.asarray(np.asarray(array))


def _group_spreads(
    spreads: Mapping[str, Spread | None], expected: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, Spread | None]:
    """Where scales and zero points come from whose matrices are spread along their inputs.

    Raises ConfigError where a group would be of inputs that lie apart: a zero among others' numbers is not exact.
    """
    by_group = {}
    for name, spread in spreads.items():
        if spread is not None and spread.axis == 1 and name.endswith((".scales", ".zeros")):
            by_group[name] = spread.of_groups(expected[name].shape[1])
            if by_group[name] is None:
                raise ConfigError(
                    f"{name}: split over mesh.tensor {mesh.size} devices, a group would hold inputs that lie apart; "
                    f"choose a mesh.tensor that divides the model evenly, or smaller groups"
                )
    return by_group


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
