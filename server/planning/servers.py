"""Starts a server of our own in a process beside this one, waits until it is ready, and ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxserve.config_file import config_yaml
from jaxserve.errors import JaxserveError
from server.config import ServeConfig

START_TIMEOUT_S = 1800.0  # a first start compiles
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1


class ServerStartError(JaxserveError):
    """The server ended, or was not ready in time; carries its last words."""


@contextmanager
def running_server(config: ServeConfig) -> Iterator[str]:
    """Its URL, once it is ready. It listens on a port of the system's choice. Raises ServerStartError."""
    private = config.server.model_copy(update={"host": "127.0.0.1", "port": 0, "shutdown_timeout_s": 1.0})
    with TemporaryDirectory(prefix="jaxserve-plan-") as folder:
        settings, log = Path(folder, "config.yaml"), Path(folder, "log")
        settings.write_text(config_yaml(config.model_copy(update={"server": private})), encoding="utf-8")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "server", "serve", "--config", str(settings)],
                stdout=output,
                stderr=output,
                env=os.environ | {"COLUMNS": "400"},  # a line of the log is not to be broken
            )
        try:
            yield _wait_until_ready(process, log)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(line.startswith("ready: ") for line in lines):
            return next(line for line in lines if line.startswith("listening on ")).removeprefix("listening on ")
        if process.poll() is not None:
            last = "; ".join(line.strip() for line in lines[-3:] if line.strip())
            raise ServerStartError(f"the server ended with status {process.returncode} before it was ready: {last}")
        time.sleep(_POLL_S)
    raise ServerStartError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Twice, if need be: a second signal does not wait for requests."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_TIMEOUT_S / 3)
        except subprocess.TimeoutExpired:
            continue
