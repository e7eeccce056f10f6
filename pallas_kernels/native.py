"""C code of ours, compiled by the machine that runs it and kept in a folder; knows nothing of what it computes."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version

log = logging.getLogger(__name__)

# Contracting a product and a sum into one instruction is what makes half of the speed; GNU C allows it, ISO C does not.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared")
LIBRARIES = ("-lm",)
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 120.0


class NativeCodeError(Exception):
    """Code that cannot be compiled or loaded here; the message says why in a line."""


def load_library(sources: Sequence[Path], folder: Path | None) -> ctypes.CDLL:
    """The first source (which includes the others) as a library of this process.

    Args:
      folder: where it stays for the next process, made if it is not there; None: nowhere, each process compiles.

    Raises:
      NativeCodeError.
    """
    try:
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="jaxserve-") as private:
                return ctypes.CDLL(str(_build(sources, Path(private))))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trust(folder)
        return ctypes.CDLL(str(_build(sources, folder)))
    except OSError as error:
        raise NativeCodeError(str(error)) from error


def cpu_features() -> str:
    """The CPU's name and instruction sets, in whatever words the system has for them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    wanted = [values[name] for name in ("model name", "CPU part", "flags", "Features") if name in values]
    return " ".join((platform.machine(), *wanted))


def _build(sources: Sequence[Path], folder: Path) -> Path:
    """The library's path in the folder. It appears whole or not at all, however many processes build it at once."""
    compiler = _compiler()
    parts = [*(path.read_text(encoding="utf-8") for path in sources), *FLAGS, *LIBRARIES, *compiler]
    parts += [_output_of([*compiler, "--version"]), cpu_features(), jaxlib.version.__version__]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    library = folder / f"{sources[0].stem}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as unfinished:
            start = time.perf_counter()
            built = Path(unfinished) / library.name
            include = f"-I{jax.ffi.include_dir()}"
            _output_of([*compiler, *FLAGS, include, "-o", str(built), str(sources[0]), *LIBRARIES])
            built.replace(library)
            log.info(
                "compiled %s with %s in %.0f ms", sources[0].name, compiler[0], (time.perf_counter() - start) * 1e3
            )
    return library


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [[name] for name in COMPILERS]:
        if shutil.which(command[0]) is not None:
            return command
    names = asked[0] if asked else ", ".join(COMPILERS)
    raise NativeCodeError(f"no C compiler is on the PATH (looked for {names})")


def _output_of(command: list[str]) -> str:
    """Raises NativeCodeError with the first line of the compiler's that says error, or else its first."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NativeCodeError(f"{command[0]} did not finish within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise NativeCodeError(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[0])[:300]}")
    return done.stdout


def _check_trust(folder: Path) -> None:
    """A library is code: whoever can put one there runs it in our process."""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise NativeCodeError(f"{folder} belongs to another user, or everyone can write to it")
