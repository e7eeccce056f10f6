"""Servers as processes of their own, on a tiny model, for the fuzzing and the soak; owns their logs."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "server"))
from tiny_weights import write_tiny_weights  # noqa: E402

from jaxserve.text.tokenizer import load_tokenizer, save_tokenizer  # noqa: E402
from models.checkpoint import resolve_model  # noqa: E402

READY_TIMEOUT_S = 300.0
EXIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """Attributes: address: `http://host:port` of a server, `host:port` of an engine."""

    address: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def check_alive(self) -> None:
        """Raises unless it runs and has logged no traceback."""
        told = self.log.read_text(errors="replace")
        assert self.process.poll() is None, f"it left with {self.process.returncode}: {told[-3000:]}"
        self.check_log()

    def check_log(self) -> None:
        told = self.log.read_text(errors="replace")
        assert "Traceback" not in told, told[max(0, told.index("Traceback") - 500) :][:4000]

    def stop(self) -> None:
        """Raises unless SIGTERM ends it properly."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(EXIT_TIMEOUT_S)
        assert status == 0, f"it left with {status}: {self.log.read_text(errors='replace')[-3000:]}"


def write_tiny_model(folder: Path) -> Path:
    """A random two-layer model with the embedded model's tokenizer, as a Hugging Face folder named `tiny`."""
    model = folder / "tiny"
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    save_tokenizer(tokenizer, model)
    write_tiny_weights(model, tokenizer.vocab_size)
    return model


@contextmanager
def server_process(model: Path, settings: Sequence[str], log: Path) -> Iterator[Running]:
    """`jaxserve serve` on any free port; entered when it is ready."""
    with _process(["serve", "--model", str(model)], ["server.port=0", *settings], log) as process:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            told = log.read_text()
            assert process.poll() is None, told[-3000:]
            assert time.monotonic() < deadline, told[-3000:]
            match = re.search(r"http://[\d.]+:\d+", told)
            if match and _is_ready(match[0]):
                break
            time.sleep(0.2)
        yield Running(address=match[0], process=process, log=log)


@contextmanager
def engine_process(model: Path, settings: Sequence[str], log: Path) -> Iterator[Running]:
    """`jaxserve engine` on a free port; entered when it is ready."""
    address = f"127.0.0.1:{free_port()}"
    with _process(["engine", "--model", str(model), "--listen", address], settings, log) as process:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not re.search(r"^ready: ", told := log.read_text(), re.MULTILINE):
            assert process.poll() is None, told[-3000:]
            assert time.monotonic() < deadline, told[-3000:]
            time.sleep(0.2)
        yield Running(address=address, process=process, log=log)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def _process(arguments: Sequence[str], settings: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "server", *arguments]
    for setting in settings:
        command += ["--set", setting]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def metrics_of(url: str) -> dict[str, float]:
    """Every sample by its name, prefix and labels taken off; samples that differ in labels are summed."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        match = re.fullmatch(r"(?:\w+:)?(\w+)(?:\{.*\})? (\S+)", line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found
