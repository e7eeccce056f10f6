"""Whether a configuration fits a machine, which need not be here: compiles its programs for it, from shapes alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jaxserve.aot.collectives import Collective, collectives
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape
from jaxserve.device.programs import ProgramSpec, compile_step
from jaxserve.device.sharding import bytes_per_device, tensor_mesh
from jaxserve.startup.loading import program_spec, resolve_for
from models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramFit:
    """One step's program as the machine's own compiler sees it; all bytes are one device's.

    Attributes:
      argument_bytes: weights, pages and sampler rows, which stay; `temporary_bytes`: while it runs.
      refusal: why the compiler would not have it, in a line; None where it compiled.
      collectives: what travels between the devices.
    """

    shape: StepShape
    compile_s: float
    argument_bytes: int = 0
    temporary_bytes: int = 0
    refusal: str | None = None
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A configuration on a machine; all bytes are one device's.

    Attributes:
      config: resolved for the machine.
      usable_bytes: what a process may fill of the device's memory.
      page_bytes: of one page in all layers.
      state_bytes: the sampler's rows and the last tokens.
      num_pages: with the dummy page.
    """

    config: EngineConfig
    usable_bytes: int
    weight_bytes: int
    page_bytes: int
    state_bytes: int
    num_pages: int
    programs: tuple[ProgramFit, ...]

    @property
    def page_size(self) -> int:
        assert isinstance(self.config.cache.page_size, int)
        return self.config.cache.page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages hold, the dummy page left out."""
        return (self.num_pages - 1) * self.page_size

    def concurrency(self, tokens: int) -> int:
        """Requests of so many tokens that run at once."""
        pages = -(-tokens // self.page_size)
        return min(self.config.scheduler.max_num_seqs, (self.num_pages - 1) // pages)

    @property
    def fits(self) -> bool:
        return all(
            program.refusal is None and program.argument_bytes + program.temporary_bytes <= self.usable_bytes
            for program in self.programs
        )

    @property
    def most_pages(self) -> int:
        """Pages that would leave just enough for the largest program's temporaries."""
        temporary = max((program.temporary_bytes for program in self.programs), default=0)
        free = self.usable_bytes - self.weight_bytes - self.state_bytes - temporary
        return max(0, free // self.page_bytes)


def measure_fit(
    config: EngineConfig,
    model: ModelConfig,
    devices: Sequence[jax.Device],
    *,
    usable_bytes: int,
    only_largest: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Fit:
    """Compiles a configuration's programs for a machine, which need not be here.

    Args:
      devices: of the machine, see `topologies.absent_devices`.
      usable_bytes: of each device's memory.
      only_largest: of the steps, only the largest with prompts and the largest without: they decide what fits.
      progress: called with (program, done, total) before each program.

    Raises:
      ConfigError: the configuration contradicts itself or the machine.
    """
    mesh = tensor_mesh(config.mesh.tensor, devices)
    config = resolve_for(config, model, mesh=mesh, free_bytes=usable_bytes)
    spec = program_spec(config, model, model.vocab_size, mesh)
    shapes = _largest(spec) if only_largest else spec.shapes
    fits: list[ProgramFit] = []
    for shape in shapes:  # in this thread: in another, libtpu overflowed its stack on a v6e step of 64 prefill blocks
        if progress is not None:
            progress(str(shape), len(fits), len(shapes))
        fits.append(_compile(spec, shape))
    state = spec.state()
    pages_bytes = bytes_per_device(jax.tree.leaves(state.kv))
    return Fit(
        config=config,
        usable_bytes=usable_bytes,
        weight_bytes=bytes_per_device(jax.tree.leaves(spec.params)),
        page_bytes=pages_bytes // spec.num_pages,
        state_bytes=bytes_per_device(jax.tree.leaves(state)) - pages_bytes,
        num_pages=spec.num_pages,
        programs=tuple(fits),
    )


def _largest(spec: ProgramSpec) -> tuple[StepShape, ...]:
    def size(shape: StepShape) -> int:
        return shape.decode_rows + shape.prefill_blocks * spec.block_q

    with_prompts = [shape for shape in spec.shapes if shape.prefill_blocks]
    without = [shape for shape in spec.shapes if not shape.prefill_blocks]
    return tuple(max(shapes, key=size) for shapes in (without, with_prompts))


def _compile(spec: ProgramSpec, shape: StepShape) -> ProgramFit:
    start = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):  # by which kernels learn their device's kind
            compiled = compile_step(spec, shape)
    except jax.errors.JaxRuntimeError as error:
        refusal = str(error).partition("\n")[0]
        return ProgramFit(shape=shape, compile_s=time.perf_counter() - start, refusal=refusal)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None  # jax has both for every compiler that this package knows
    assert hlo is not None
    return ProgramFit(
        shape=shape,
        compile_s=time.perf_counter() - start,
        argument_bytes=memory.argument_size_in_bytes,
        # What is returned in the place of a donated argument takes nothing of its own.
        temporary_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=collectives(hlo),
    )
