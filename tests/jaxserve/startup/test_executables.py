"""Stored programs: found without compiling, never mistaken for others, made again when damaged."""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

import jaxserve.startup.executables as executables
from jaxserve.compilations import COMPILATIONS
from jaxserve.errors import ConfigError
from jaxserve.startup.executables import MANIFEST, ProgramSet, cached_set, new_bundle, open_bundle

FIELDS = {"jax": "1", "model.layers": "2", "num_pages": "65"}
DEVICES = jax.devices()[:1]


def compile_double() -> Compiled:
    return (
        jax.jit(lambda x: {"twice": x * 2}, donate_argnums=0).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    )


def never() -> Compiled:
    raise AssertionError("it should have been loaded")


def twice(program: Callable[..., Any]) -> list[float]:
    result: list[float] = program(jnp.arange(4.0))["twice"].tolist()
    return result


def test_a_stored_program_is_loaded_without_compiling(tmp_path: Path) -> None:
    first = cached_set(tmp_path, FIELDS, DEVICES)
    assert twice(first.obtain("double", compile_double)) == [0, 2, 4, 6]
    assert (first.loaded, first.compiled) == (0, 1)
    argument = jnp.arange(4.0)
    before = COMPILATIONS.total
    second = cached_set(tmp_path, FIELDS, DEVICES)
    program = second.obtain("double", never)
    assert program(argument)["twice"].tolist() == [0, 2, 4, 6]
    assert COMPILATIONS.total == before
    assert (second.loaded, second.compiled) == (1, 0)
    assert argument.is_deleted()  # it is still donated
    with pytest.raises(TypeError):
        program(jnp.arange(5.0))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_a_damaged_program_is_compiled_again_and_said(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    programs = cached_set(tmp_path, FIELDS, DEVICES)
    programs.obtain("double", compile_double)
    (path,) = programs.folder.glob("double*")
    path.write_bytes(damage(path.read_bytes()))
    assert twice(programs.obtain("double", compile_double)) == [0, 2, 4, 6]
    assert "double" in caplog.text
    assert "damaged; compiling it again" in caplog.text
    assert twice(programs.obtain("double", never)) == [0, 2, 4, 6]


def test_a_program_that_the_loader_refuses_is_compiled_again_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs = cached_set(tmp_path, FIELDS, DEVICES)
    programs.obtain("double", compile_double)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Target machine feature +prefer-no-gather is not supported")

    monkeypatch.setattr(executables, "deserialize_and_load", refuse)
    assert twice(programs.obtain("double", compile_double)) == [0, 2, 4, 6]
    assert "prefer-no-gather" in caplog.text


def test_a_program_is_never_loaded_for_another_start_which_is_told_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached_set(tmp_path, FIELDS, DEVICES).obtain("double", compile_double)
    cached_set(tmp_path, FIELDS | {"jax": "3", "num_pages": "99", "model.layers": "2"}, DEVICES)
    caplog.clear()
    other = cached_set(tmp_path, FIELDS | {"jax": "2"}, DEVICES)
    assert other.load("double") is None
    assert "for another start: jax was 1, is 2" in caplog.text


def test_the_first_start_of_a_model_needs_no_explanation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached_set(tmp_path, FIELDS, DEVICES)
    cached_set(tmp_path, FIELDS | {"model.layers": "3"}, DEVICES)
    assert not caplog.records


def test_starts_at_the_same_time_share_a_set(tmp_path: Path) -> None:
    def start(_: int) -> list[float]:
        return twice(cached_set(tmp_path, FIELDS, DEVICES).obtain("double", compile_double))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(start, range(16))) == [[0, 2, 4, 6]] * 16
    programs = cached_set(tmp_path, FIELDS, DEVICES)
    assert sorted(path.name for path in programs.folder.iterdir()) == ["double.program", MANIFEST]


def test_the_sets_used_last_stay_when_the_cache_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []
    for age in range(4):
        programs = cached_set(tmp_path, FIELDS | {"jax": str(age)}, DEVICES)
        (programs.folder / "step.program").write_bytes(bytes(1000))
        long_ago = time.time() - 1000 * (age + 1)
        os.utime(programs.folder / MANIFEST, (long_ago, long_ago))
        folders.append(programs.folder)
    monkeypatch.setattr(executables, "MAX_CACHE_BYTES", 3500)
    assert cached_set(tmp_path, FIELDS | {"jax": "3"}, DEVICES).folder == folders[3]  # the oldest, but in use now
    assert [folder.exists() for folder in folders] == [True, True, False, True]


def test_a_disk_that_is_full_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    programs = cached_set(tmp_path, FIELDS, DEVICES)

    def fail(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executables, "_write", fail)
    assert twice(programs.obtain("double", compile_double)) == [0, 2, 4, 6]
    assert "double cannot be stored" in caplog.text


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[None]:
    """jax's own persistent cache, as a user may have turned it on."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("jax_cache")
def test_a_program_from_jaxs_own_cache_is_not_stored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """XLA's CPU backend would serialize it without its functions: it loads, and fails when it runs."""
    compile_double()
    programs = cached_set(tmp_path / "ours", FIELDS, DEVICES)
    assert twice(programs.obtain("double", compile_double)) == [0, 2, 4, 6]
    assert "came from jax's own compilation cache" in caplog.text
    assert programs.load("double") is None


def test_a_folder_that_everyone_can_write_to_is_refused(tmp_path: Path) -> None:
    """A program is code: whoever can put one there runs it in our process."""
    cache = tmp_path / "cache"
    cached_set(cache, FIELDS, DEVICES)
    assert cache.stat().st_mode & 0o077 == 0
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=r"written by everyone.*chmod o-w.*compilation_cache"):
        cached_set(cache, FIELDS, DEVICES)
    bundle = tmp_path / "bundle"
    new_bundle(bundle, FIELDS, DEVICES)
    bundle.chmod(0o777)
    with pytest.raises(ConfigError, match=r"written by everyone.*execution.bundle"):
        open_bundle(bundle, FIELDS, (), DEVICES)


def test_a_cache_that_cannot_be_made_names_the_knob(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"execution.compilation_cache"):
        cached_set(tmp_path / "file" / "cache", FIELDS, DEVICES)


def test_a_bundle_serves_the_start_that_it_was_compiled_for(tmp_path: Path) -> None:
    new_bundle(tmp_path, FIELDS, DEVICES).obtain("double", compile_double)
    bundle = open_bundle(tmp_path, FIELDS, ("double",), DEVICES)
    assert twice(bundle.require("double", never)) == [0, 2, 4, 6]


def test_a_bundle_for_something_else_is_refused_by_the_first_difference(tmp_path: Path) -> None:
    new_bundle(tmp_path, FIELDS, DEVICES)
    with pytest.raises(ConfigError, match=r"compiled for another num_pages: it has 65, this start 66"):
        open_bundle(tmp_path, FIELDS | {"num_pages": "66"}, (), DEVICES)
    with pytest.raises(ConfigError, match=r"compiled for another jax: it has 1, this start 2"):
        new_bundle(tmp_path, FIELDS | {"jax": "2"}, DEVICES)


def test_a_bundle_without_a_program_that_is_needed_is_refused(tmp_path: Path) -> None:
    new_bundle(tmp_path, FIELDS, DEVICES).obtain("double", compile_double)
    with pytest.raises(ConfigError, match=r"lacks the program triple; it has double"):
        open_bundle(tmp_path, FIELDS, ("double", "triple"), DEVICES)


def test_a_damaged_program_of_a_bundle_is_an_error(tmp_path: Path) -> None:
    new_bundle(tmp_path, FIELDS, DEVICES).obtain("double", compile_double)
    (tmp_path / "double.program").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"double\.program: the stored program is damaged"):
        open_bundle(tmp_path, FIELDS, ("double",), DEVICES).require("double", never)


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"jax": 1}'])
def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path, manifest: str | None) -> None:
    if manifest is not None:
        (tmp_path / MANIFEST).write_text(manifest)
    with pytest.raises(ConfigError, match="is no bundle"):
        open_bundle(tmp_path, FIELDS, (), DEVICES)
    with pytest.raises(ConfigError, match="No such file"):
        open_bundle(tmp_path / "absent", FIELDS, (), DEVICES)


def test_a_bundle_is_not_written_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        new_bundle(tmp_path, FIELDS, DEVICES)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_set_says_in_plain_text_what_it_depends_on(tmp_path: Path) -> None:
    programs = cached_set(tmp_path, FIELDS, DEVICES)
    assert isinstance(programs, ProgramSet)
    assert json.loads((programs.folder / MANIFEST).read_text()) == FIELDS
    assert np.all([path.stat().st_mode & 0o077 == 0 for path in programs.folder.iterdir()])
