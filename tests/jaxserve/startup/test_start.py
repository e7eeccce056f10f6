"""Where programs come from at a start, on the tiny model: compiled once, then from the cache or a bundle."""

import ctypes
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.stages import Compiled
from tiny_engine import (
    EOS,
    NUM_TOKEN_IDS,
    TINY_MODEL,
    TinyOptions,
    drain,
    tiny_config,
    tiny_params,
    tokens_of,
)

from jaxserve.compilations import COMPILATIONS, CompilationCounter
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape, step_shapes
from jaxserve.device.programs import (
    COMPILE_STACK_BYTES,
    Obtain,
    Programs,
    ProgramSpec,
    compile_programs,
    compile_step,
    program_name,
)
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.sharding import tensor_mesh
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.request import SamplingParams
from jaxserve.startup.fingerprint import digest, fingerprint
from jaxserve.startup.loading import program_spec
from jaxserve.startup.start import add_the_rest, first_shapes, load_programs, write_bundle

pytestmark = pytest.mark.usefixtures("compiled_quickly")

OPTIONS = TinyOptions(
    max_num_seqs=4, max_num_batched_tokens=20, num_pages=17, decode_buckets=(2, 4), prefill_buckets=(1,)
)


def config_with(**execution: Any) -> EngineConfig:
    config = tiny_config(OPTIONS)
    return config.model_copy(update={"execution": config.execution.model_copy(update=execution)})


SPEC: ProgramSpec = program_spec(config_with(), TINY_MODEL, NUM_TOKEN_IDS, tensor_mesh(1, jax.devices()))


def load(**execution: Any) -> tuple[Programs, Obtain]:
    return load_programs(config_with(**execution).execution, SPEC, lambda done, total: None)


def run(programs: Programs) -> dict[str, list[int]]:
    """What an engine with these programs answers to a mixture of requests."""
    engine = Engine(
        config_with(),
        TINY_MODEL,
        DeviceRunner(SPEC, programs, tiny_params()),
        num_token_ids=NUM_TOKEN_IDS,
        eos_token_ids=frozenset({EOS}),
    )
    for i in range(6):
        params = SamplingParams(max_tokens=5, seed=i, logit_bias={7: 2.0}, repetition_penalty=1.1, logprobs=1)
        engine.add(str(i), [3 + i] * (1 + 5 * i), params)
    return {name: tokens_of(outputs) for name, outputs in drain(engine).items()}


@dataclass(frozen=True)
class FirstStart:
    """What a start with an empty cache left, and what its programs answered."""

    cache: Path
    answers: dict[str, list[int]]


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> FirstStart:
    cache = tmp_path_factory.mktemp("cache")
    programs, _ = load(compilation_cache=str(cache))
    return FirstStart(cache, run(programs))


@pytest.fixture
def cache(first_start: FirstStart) -> Path:
    return first_start.cache


@pytest.fixture(scope="module")
def bundle(first_start: FirstStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Begun by a `compile` that was interrupted, and finished by another."""
    folder = tmp_path_factory.mktemp("start") / "bundle"
    shutil.copytree(first_start.cache / digest(fingerprint(SPEC)), folder)
    (folder / "set_counts.program").unlink()
    (folder / "new_state.program").unlink()
    assert write_bundle(folder, SPEC, lambda done, total: None) == 6
    return folder


def test_the_second_start_compiles_nothing_and_answers_the_same(first_start: FirstStart) -> None:
    before = COMPILATIONS.total
    programs, _ = load(compilation_cache=str(first_start.cache))
    answers = run(programs)
    assert COMPILATIONS.total == before
    assert answers == first_start.answers


def test_a_start_from_a_bundle_compiles_nothing(bundle: Path, first_start: FirstStart) -> None:
    before = COMPILATIONS.total
    programs, _ = load(bundle=str(bundle))
    answers = run(programs)
    assert COMPILATIONS.total == before
    assert answers == first_start.answers


def test_a_bundle_is_only_left_aside_if_that_was_asked_for(
    bundle: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    (damaged / "set_bias.program").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"set_bias.program: the stored program is damaged"):
        load(bundle=str(damaged))
    programs, _ = load(bundle=str(damaged), bundle_fallback=True, compilation_cache=str(cache))
    assert programs.steps.keys() == set(SPEC.shapes)
    assert "going on without it (execution.bundle_fallback)" in caplog.text


def test_progress_counts_every_program_wherever_it_comes_from(cache: Path) -> None:
    told: list[tuple[int, int]] = []
    load_programs(config_with(compilation_cache=str(cache)).execution, SPEC, lambda *count: told.append(count))
    assert told == [(done, 6) for done in range(1, 7)]


def stack_bytes() -> int:
    """Of the calling thread, as glibc has it."""
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_ulong
    attributes, size = ctypes.create_string_buffer(64), ctypes.c_size_t()
    libc.pthread_getattr_np(ctypes.c_ulong(libc.pthread_self()), attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    libc.pthread_attr_destroy(attributes)
    return size.value


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_threads_that_compile_have_a_stack_for_it(cache: Path, counter: CompilationCounter) -> None:
    stacks: dict[str, int] = {}
    _, obtain = load(compilation_cache=str(cache))

    def obtain_and_look(name: str, compile_program: Callable[[], Compiled]) -> Compiled:
        stacks[name] = stack_bytes()
        return obtain(name, never)

    programs = compile_programs(SPEC, lambda done, total: None, obtain_and_look, shapes=SPEC.shapes[1:])
    add_the_rest(SPEC, programs, obtain_and_look, counter).join()
    assert len(stacks) == 6
    assert min(stacks.values()) >= COMPILE_STACK_BYTES
    assert threading.stack_size() == 0  # other threads are as they were


def test_the_first_steps_hold_all_others() -> None:
    shapes = step_shapes((1, 8, 32), (2, 4, 16))
    assert first_shapes(shapes) == (
        StepShape(decode_rows=32, prefill_blocks=0),
        StepShape(decode_rows=32, prefill_blocks=16),
    )


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompilationCounter:
    """The process's one counter, as before `mark_ready`; put back afterwards."""
    monkeypatch.setattr(COMPILATIONS, "total_when_ready", None)
    return COMPILATIONS


def test_serving_while_compiling_begins_with_few_steps_and_ends_with_all(
    cache: Path, counter: CompilationCounter
) -> None:
    programs, obtain = load(compilation_cache=str(cache), serve_while_compiling=True)
    assert programs.available_shapes() == first_shapes(SPEC.shapes)
    few = run(programs)
    waiting: list[int] = []

    def obtain_and_look(name: str, compile_program: Callable[[], Compiled]) -> Compiled:
        waiting.append(counter.pending)
        assert counter.after_ready == 0
        return compile_step(SPEC, SPEC.shapes[0]) if name == program_name(SPEC.shapes[0]) else obtain(name, never)

    add_the_rest(SPEC, programs, obtain_and_look, counter).join()
    assert waiting == [1]
    assert programs.available_shapes() == SPEC.shapes
    assert (counter.pending, counter.after_ready) == (0, 0)  # compiled before ready, though requests were served
    assert counter.total_when_ready is not None
    assert run(programs) == few


def never() -> Compiled:
    raise AssertionError("it should have been loaded")


def test_a_step_that_cannot_be_compiled_leaves_the_others_serving(
    cache: Path, counter: CompilationCounter, caplog: pytest.LogCaptureFixture
) -> None:
    programs, _ = load(compilation_cache=str(cache), serve_while_compiling=True)

    def fail(name: str, compile_program: Callable[[], Compiled]) -> Compiled:
        raise RuntimeError("out of memory")

    add_the_rest(SPEC, programs, fail, counter).join()
    assert "1 steps could not be compiled" in caplog.text
    assert (counter.pending, counter.after_ready) == (0, 0)
    assert run(programs)
