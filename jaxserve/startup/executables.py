"""Keeps compiled programs in files, so that a start neither traces nor compiles; knows nothing of what they compute.

A *set* is a folder: `manifest.json` says all that its programs depend on, and each program has a file. The user's cache
is a folder of sets, named by the digest of what they depend on; a bundle is one set. A program is code: loading one
runs it, so a folder that others can write to is refused.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled

from jaxserve.compilations import COMPILATIONS
from jaxserve.errors import ConfigError
from jaxserve.startup.fingerprint import differences, digest

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SUFFIX = ".program"
MAX_CACHE_BYTES = 4 * 2**30
DIGEST_BYTES = hashlib.sha256().digest_size


class DamagedProgramError(Exception):
    """A stored program that cannot be loaded; the message says which and why."""


class ProgramSet:
    """One folder of programs with one fingerprint. Threads may share it, and so may processes.

    Attributes:
      loaded, compiled: how many programs came which way.
    """

    def __init__(self, folder: Path, devices: Sequence[jax.Device]) -> None:
        self.folder = folder
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self.loaded = 0
        self.compiled = 0

    def obtain(self, name: str, compile_program: Callable[[], Compiled]) -> Compiled:
        """The stored program, or else the compiled one, which is stored then."""
        try:
            program = self.load(name)
        except DamagedProgramError as error:
            log.warning("%s; compiling it again", error)
            program = None
        if program is None:
            hits = COMPILATIONS.cache_hits_in_thread
            program = compile_program()
            with self._lock:
                self.compiled += 1
            if COMPILATIONS.cache_hits_in_thread == hits:
                self.save(name, program)
            else:
                # XLA's CPU backend serializes such a program without its functions; it would load, and then not run.
                log.warning("%s came from jax's own compilation cache and is not stored; unset its folder", name)
        return program

    def require(self, name: str, _: Callable[[], Compiled]) -> Compiled:
        """The stored program; raises ConfigError where there is none that can be loaded."""
        try:
            program = self.load(name)
        except DamagedProgramError as error:
            raise ConfigError(str(error)) from error
        if program is None:
            raise ConfigError(f"{self.folder} lacks the program {name}")
        return program

    def load(self, name: str) -> Compiled | None:
        """Returns None where the set has no such program; raises DamagedProgramError."""
        path = self._path(name)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedProgramError(f"{path}: {error.strerror}") from error
        checksum, payload = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != checksum:
            raise DamagedProgramError(f"{path}: the stored program is damaged")
        try:
            executable, in_tree, out_tree = pickle.loads(payload)
            program = deserialize_and_load(executable, in_tree, out_tree, execution_devices=self._devices)
        except Exception as error:  # whatever a compiler's loader has to say; on some CPUs it refuses its own programs
            reason = str(error).partition("\n")[0][:200]
            raise DamagedProgramError(f"{path}: cannot be loaded here: {type(error).__name__}: {reason}") from error
        with self._lock:
            self.loaded += 1
        return program

    def save(self, name: str, program: Compiled) -> None:
        """Stores a program; where that fails, the next start compiles, and the log says why."""
        try:
            payload = pickle.dumps(serialize(program))
            _write(self._path(name), hashlib.sha256(payload).digest() + payload)
        except Exception as error:
            log.warning("%s cannot be stored in %s: %s", name, self.folder, error)

    def _path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX)


def cached_set(cache: Path, fields: Mapping[str, str], devices: Sequence[jax.Device]) -> ProgramSet:
    """The set of the user's cache for these programs, made if it is not there; old sets make room.

    Args:
      fields: `fingerprint(spec)`.

    Raises:
      ConfigError: the folder cannot be used, or others can write to it.
    """
    folder = cache / digest(fields)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trust(cache, "execution.compilation_cache")
        if not (folder / MANIFEST).exists():
            _explain_miss(cache, fields)
            folder.mkdir(mode=0o700, exist_ok=True)
            _write_manifest(folder, fields)
        os.utime(folder / MANIFEST)  # its age is the set's
        _prune(cache, keep=folder)
    except OSError as error:
        raise ConfigError(
            f"cannot keep compiled programs in {cache}: {error.strerror} (execution.compilation_cache)"
        ) from None
    return ProgramSet(folder, devices)


def new_bundle(folder: Path, fields: Mapping[str, str], devices: Sequence[jax.Device]) -> ProgramSet:
    """An empty set, or one that an interrupted `compile` left; raises ConfigError where other programs lie there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MANIFEST).exists():
            _check_match(folder, fields)
        elif any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and holds no bundle; choose another folder")
        else:
            _write_manifest(folder, fields)
    except OSError as error:
        raise ConfigError(f"cannot write a bundle to {folder}: {error.strerror}") from None
    return ProgramSet(folder, devices)


def open_bundle(
    folder: Path, fields: Mapping[str, str], names: Sequence[str], devices: Sequence[jax.Device]
) -> ProgramSet:
    """A bundle that has every program of this start.

    Raises:
      ConfigError: it is none, others can write to it, it was compiled for something else (the message names the first
        difference), or it lacks one of the `names`.
    """
    _check_trust(folder, "execution.bundle")
    _check_match(folder, fields)
    missing = [name for name in names if not (folder / (name + SUFFIX)).exists()]
    if missing:
        stored = sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))
        raise ConfigError(f"bundle {folder} lacks the program {missing[0]}; it has {', '.join(stored)}")
    return ProgramSet(folder, devices)


def _check_match(folder: Path, fields: Mapping[str, str]) -> None:
    stored = _read_manifest(folder)
    if stored is None:
        raise ConfigError(f"{folder} is no bundle: it has no readable {MANIFEST}")
    for name, theirs, ours in differences(stored, fields):
        raise ConfigError(f"bundle {folder} was compiled for another {name}: it has {theirs}, this start {ours}")


def _check_trust(folder: Path, knob: str) -> None:
    """Raises ConfigError where the folder is missing, or someone else could have put programs there."""
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror} ({knob})") from None
    if os.name != "posix":
        return
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{folder} belongs to another user, and programs are code; use a folder of your own ({knob})")
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{folder} can be written by everyone, and programs are code: chmod o-w {folder} ({knob})")


def _explain_miss(cache: Path, fields: Mapping[str, str]) -> None:
    """Says in what the nearest set differs: someone who starts the same model again expects its programs there."""
    nearest: list[tuple[str, str, str]] | None = None
    for folder in _sets(cache):
        stored = _read_manifest(folder)
        if stored is None or any(
            value != stored.get(name) for name, value in fields.items() if name.startswith("model.")
        ):
            continue
        found = differences(stored, fields)
        if nearest is None or len(found) < len(nearest):
            nearest = found
    if nearest:
        changes = "; ".join(f"{name} was {theirs}, is {ours}" for name, theirs, ours in nearest)
        log.warning("compiling: programs of this model are stored, but for another start: %s", changes)


def _prune(cache: Path, keep: Path) -> None:
    """Removes the sets that were not used for longest until the cache is within its size."""
    by_age = sorted((folder for folder in _sets(cache) if folder != keep), key=_last_use, reverse=True)
    total = _size(keep)
    for folder in by_age:
        total += _size(folder)
        if total > MAX_CACHE_BYTES:
            shutil.rmtree(folder, ignore_errors=True)


def _sets(cache: Path) -> Iterator[Path]:
    return (path.parent for path in cache.glob(f"*/{MANIFEST}"))


def _last_use(folder: Path) -> float:
    try:
        return (folder / MANIFEST).stat().st_mtime
    except FileNotFoundError:  # another process removed it
        return 0.0


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _read_manifest(folder: Path) -> dict[str, str] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(manifest, dict) and all(isinstance(value, str) for value in manifest.values())
    return manifest if is_ours else None


def _write_manifest(folder: Path, fields: Mapping[str, str]) -> None:
    _write(folder / MANIFEST, (json.dumps(dict(fields), indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    """The file appears whole or not at all, however many processes write it at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
