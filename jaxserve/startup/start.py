"""Where a start's programs come from: a bundle, the user's cache or the compiler; all before ready, or some after."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

from jaxserve.compilations import COMPILATIONS, CompilationCounter
from jaxserve.config import ExecutionSection
from jaxserve.device.buckets import StepShape
from jaxserve.device.programs import (
    Obtain,
    Programs,
    ProgramSpec,
    compile_now,
    compile_programs,
    compile_step,
    deep_stacks,
    program_name,
    program_names,
)
from jaxserve.errors import ConfigError
from jaxserve.startup.executables import cached_set, new_bundle, open_bundle
from jaxserve.startup.fingerprint import fingerprint

log = logging.getLogger(__name__)

Count = Callable[[int, int], None]  # done, total


def load_programs(execution: ExecutionSection, spec: ProgramSpec, progress: Count) -> tuple[Programs, Obtain]:
    """The programs that ready needs, and where the others come from if it does not need all.

    Raises:
      ConfigError: the bundle does not serve this start and `bundle_fallback` is off, or the cache cannot be used.
    """
    shapes = first_shapes(spec.shapes) if execution.serve_while_compiling else spec.shapes
    start = time.perf_counter()
    if execution.bundle is not None:
        try:
            bundle = open_bundle(Path(execution.bundle), fingerprint(spec), program_names(spec), _devices(spec))
            programs = compile_programs(spec, progress, bundle.require, shapes=shapes)
        except ConfigError as error:
            if not execution.bundle_fallback:
                raise
            log.warning("%s; going on without it (execution.bundle_fallback)", error)
        else:
            seconds = time.perf_counter() - start
            log.info("programs: %d loaded, 0 compiled in %.1f s; %s", bundle.loaded, seconds, bundle.folder)
            return programs, bundle.require
    if execution.compilation_cache is None:
        programs = compile_programs(spec, progress, shapes=shapes)
        count = len(programs.steps) + len(program_names(spec)) - len(spec.shapes)
        log.info("programs: 0 loaded, %d compiled in %.1f s", count, time.perf_counter() - start)
        return programs, compile_now
    cache = cached_set(Path(execution.compilation_cache), fingerprint(spec), _devices(spec))
    programs = compile_programs(spec, progress, cache.obtain, shapes=shapes)
    seconds = time.perf_counter() - start
    log.info("programs: %d loaded, %d compiled in %.1f s; %s", cache.loaded, cache.compiled, seconds, cache.folder)
    return programs, cache.obtain


def write_bundle(folder: Path, spec: ProgramSpec, progress: Count) -> int:
    """Compiles every program of `spec` into a bundle; what an interrupted call left there is kept.

    Returns:
      how many programs the bundle has.

    Raises:
      ConfigError: the folder holds something else, or cannot be written.
    """
    bundle = new_bundle(folder, fingerprint(spec), _devices(spec))
    compile_programs(spec, progress, bundle.obtain)
    open_bundle(folder, fingerprint(spec), program_names(spec), _devices(spec))
    return len(program_names(spec))


def first_shapes(shapes: tuple[StepShape, ...]) -> tuple[StepShape, ...]:
    """The fewest shapes that hold every step without waste out of all proportion.

    The largest one holds all by itself, but a step without prompts should not pay for the largest number of them.
    """
    decode_only = [shape for shape in shapes if not shape.prefill_blocks]
    return (decode_only[-1], shapes[-1])


def add_the_rest(
    spec: ProgramSpec, programs: Programs, obtain: Obtain, counter: CompilationCounter = COMPILATIONS
) -> threading.Thread:
    """Gives `programs` its missing steps, one after the other, from a thread of its own; `counter` is ready then."""
    thread = threading.Thread(target=_add_the_rest, args=(spec, programs, obtain, counter), name="compile-rest")
    with deep_stacks():
        thread.start()
    return thread


def _add_the_rest(spec: ProgramSpec, programs: Programs, obtain: Obtain, counter: CompilationCounter) -> None:
    missing = [shape for shape in spec.shapes if shape not in programs.steps]
    try:
        for number, shape in enumerate(missing):
            counter.pending = len(missing) - number
            if not threading.main_thread().is_alive():
                return  # the process ends, and would wait for this thread
            programs.steps[shape] = obtain(program_name(shape), partial(compile_step, spec, shape))
        log.info("all %d steps are compiled", len(programs.steps))
    except Exception:
        # Every request can still be served, in larger steps than it would need.
        log.exception("%d steps could not be compiled", len(missing) - number)
    finally:
        counter.pending = 0
        counter.mark_ready()


def _devices(spec: ProgramSpec) -> list[jax.Device]:
    return list(spec.mesh.devices.flat)
