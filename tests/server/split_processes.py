"""An engine's process around the fake engine, and HTTP front ends apart from it, for what kills and restarts do."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fake_engine import FAKE_MODEL, FakeEngine
from fake_process import ROOT, ServerProcess

from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import resolve_model
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.grpc.channel import open_channel
from server.grpc.remote_engine import RemoteEngine
from server.grpc.serve import run_engine_server
from server.serve import listen, run_server


@contextmanager
def engine_process(
    address: str, engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None
) -> Iterator[ServerProcess]:
    """Entered when it is ready; its `url` is the address."""
    with _process("engine", engine or {}, {"grpc_listen": address, **(server or {})}) as process:
        assert process.process.stderr is not None
        assert process.process.stderr.readline().startswith("ready: ")
        yield process


@contextmanager
def front_end(engine_address: str) -> Iterator[ServerProcess]:
    """Entered when it listens; the engine need not be there yet."""
    with _process("front", {}, {"port": 0, "engine": engine_address}) as process:
        yield process


@contextmanager
def _process(role: str, engine: dict[str, Any], server: dict[str, Any]) -> Iterator[ServerProcess]:
    process = subprocess.Popen(
        [sys.executable, __file__, role, json.dumps(engine), json.dumps(server)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(__file__).parent)))},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("listening on "), line
        yield ServerProcess(url=line.removeprefix("listening on ").strip(), process=process)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def main() -> None:
    role, engine, settings = sys.argv[1], json.loads(sys.argv[2]), ServerSection.model_validate_json(sys.argv[3])
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    if role == "engine":
        run_engine_server(AsyncEngine(lambda _: FakeEngine(**engine)), tokenizer, settings)
        return
    assert settings.engine is not None
    remote = RemoteEngine(partial(open_channel, settings.engine, None, settings.security), FAKE_MODEL)
    run_server(create_app(remote, tokenizer, settings), remote, listen(settings), settings)


if __name__ == "__main__":
    main()
