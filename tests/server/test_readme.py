"""The README's curl commands, against the tiny model."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from live_server import TIMEOUT_S, LiveServer

README = Path(__file__).parents[2] / "README.md"
COMMANDS = re.findall(r"^curl .*?'$", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_there_are_examples_of_every_api() -> None:
    paths = {path for command in COMMANDS for path in re.findall(r"/v1/[\w/]+", command)}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"} <= paths


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.findall(r"/v1/[\w/]+", command)[0])
def test_a_curl_command_is_answered(server: LiveServer, command: str) -> None:
    here = command.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "tiny")
    arguments = ["--fail-with-body" if part == "-sS" else part for part in shlex.split(here.replace("\\\n", ""))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n" if '"stream": true' in command else "}")
