"""A whole server process around the fake engine, for signals, exit statuses and what the engine's end does to both."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from fake_engine import FakeEngine

from jaxserve.errors import JaxserveError
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import resolve_model
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.serve import listen, run_server

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerProcess:
    url: str
    process: subprocess.Popen[str]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=TIMEOUT_S)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Waits for the exit: its status, and what stood on standard error since `listening`."""
        assert self.process.stderr is not None
        status = self.process.wait(TIMEOUT_S)
        return status, self.process.stderr.read()


@contextmanager
def fake_process(engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None) -> Iterator[ServerProcess]:
    """Args: engine: fields of `FakeEngine`; server: fields of the `server` section."""
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(engine or {}), json.dumps({"port": 0, **(server or {})})],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))},
    )
    try:
        assert process.stderr is not None
        url = process.stderr.readline().removeprefix("listening on ").strip()
        assert process.stderr.readline().startswith("ready: ")
        yield ServerProcess(url=url, process=process)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def main() -> None:
    engine, settings = json.loads(sys.argv[1]), ServerSection.model_validate(json.loads(sys.argv[2]))
    async_engine = AsyncEngine(lambda progress: FakeEngine(**engine), step_timeout_s=settings.step_timeout_s)
    app = create_app(async_engine, load_tokenizer(resolve_model("smollm2-135m")), settings)
    try:
        run_server(app, async_engine, listen(settings), settings)
    except JaxserveError as error:
        sys.exit(f"jaxserve: {error}")


if __name__ == "__main__":
    main()
