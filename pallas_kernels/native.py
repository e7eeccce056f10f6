"""C code of ours: compiled by the machine that runs it, kept in a folder, called by XLA; knows not what it computes."""

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
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")
LIBRARIES = ("-lm",)
HEADERS = [Path(__file__).with_name(name) for name in ("custom_call.h", "lanes.h")]  # that sources may include
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 120.0


class NativeCodeError(Exception):
    """Code that cannot be compiled or loaded here; the message says why in a line."""


class CustomCall:
    """A C function that XLA's CPU programs call by the name `jaxserve_` and its own.

    The library has it, and `self_check()`, which returns how far answers are off on small calls.
    """

    def __init__(self, function: str, sources: Sequence[Path], *, most_difference: float, contracts: bool) -> None:
        """Args:
        sources: the first includes the others.
        most_difference: of the self-check.
        contracts: whether a product and a sum may become one instruction wherever the compiler likes. That can double
          the speed; but the same expression at two places may then give different bits.
        """
        self.target = f"jaxserve_{function}"
        self.is_registered = False
        self._function, self._sources, self._most_difference = function, sources, most_difference
        self._flags = ("-ffp-contract=fast" if contracts else "-ffp-contract=off",)
        self._lock = threading.Lock()

    def prepare(self, folder: Path | None) -> str | None:
        """Makes the call known to XLA, before any program with it is compiled or loaded.

        Args:
          folder: as `load_library` takes it; read by the first call that succeeds.

        Returns:
          why that cannot be, None where it is done.
        """
        with self._lock:
            if self.is_registered:
                return None
            try:
                library = load_library(self._sources, self._flags, folder)
            except NativeCodeError as error:
                return str(error)
            library.self_check.restype = ctypes.c_double
            difference = library.self_check()
            if not difference <= self._most_difference:
                return (
                    f"what the C compiler made of {_name(self._sources)} is wrong: answers are off by {difference:.2g}"
                )
            function = getattr(library, self._function)
            jax.ffi.register_ffi_target(self.target, jax.ffi.pycapsule(function), platform="cpu")
            self.is_registered = True
            return None


def load_library(sources: Sequence[Path], flags: Sequence[str], folder: Path | None) -> ctypes.CDLL:
    """The first source (which includes the others) as a library of this process.

    Args:
      flags: of the compiler, besides those of all code of ours.
      folder: where it stays for the next process, made if it is not there; None: nowhere, each process compiles.

    Raises:
      NativeCodeError.
    """
    try:
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="jaxserve-") as private:
                return ctypes.CDLL(str(_build(sources, flags, Path(private))))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_trust(folder)
        return ctypes.CDLL(str(_build(sources, flags, folder)))
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


def _build(sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    """The library's path in the folder. It appears whole or not at all, however many processes build it at once."""
    compiler = _compiler()
    parts = [*(path.read_text(encoding="utf-8") for path in sources), *FLAGS, *flags, *LIBRARIES, *compiler]
    parts += [_output_of([*compiler, "--version"]), cpu_features(), jaxlib.version.__version__]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    library = folder / f"{sources[0].parent.name}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as unfinished:
            start = time.perf_counter()
            built = Path(unfinished) / library.name
            include = f"-I{jax.ffi.include_dir()}"
            _output_of([*compiler, *FLAGS, *flags, include, "-o", str(built), str(sources[0]), *LIBRARIES])
            built.replace(library)
            log.info("compiled %s with %s in %.0f ms", _name(sources), compiler[0], (time.perf_counter() - start) * 1e3)
    return library


def _name(sources: Sequence[Path]) -> str:
    """With the folder, which says what is computed: the files themselves are all called cpu.c."""
    return "/".join(sources[0].parts[-2:])


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
