"""What a client sees of the queue: 503 when it is full, a deadline that cuts, its salt, and the page ledger."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, serving
from tiny_server import load_tiny, tiny_config

from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.cli import main as cli
from server.config import SecuritySection, ServerSection
from server.engine.async_engine import AsyncEngine

KEY = "a-key-for-the-web"
ADMIN_KEY = "a-key-for-the-admin"
LONG: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def crowded(tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a short queue."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"web:{KEY}\n")
    (folder / "admin").write_text(f"root:{ADMIN_KEY}\n")
    section = ServerSection(
        security=SecuritySection(api_keys_file=str(folder / "keys"), admin_keys_file=str(folder / "admin"))
    )
    base = tiny_config(tiny_model)
    config = base.model_copy(update={"scheduler": base.scheduler.model_copy(update={"max_queued_requests": 3})})
    with serving(
        lambda engine: create_app(engine, tokenizer, section),
        lambda: AsyncEngine(partial(load_tiny, config, tokenizer)),
        settings=section,
    ) as live:
        live.wait_until_ready()
        yield live


def ask(live: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{live.url}/v1/completions", json=LONG | fields, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )


def test_a_full_queue_answers_at_once_with_503_and_when_to_come_back(crowded: LiveServer) -> None:
    slots = crowded.engine.limits().config.scheduler.max_num_seqs
    refused = ask(crowded, n=slots + 4)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    streamed = ask(crowded, n=slots + 4, stream=True)
    assert streamed.status_code == 503, "known before the stream begins"
    assert ask(crowded, n=slots + 3, max_tokens=1).status_code == 200


def test_a_deadline_cuts_the_answer_and_says_so(crowded: LiveServer) -> None:
    reply = ask(crowded, deadline_ms=60_000, max_tokens=3).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    cut = ask(crowded, deadline_ms=5, max_tokens=100)
    if cut.status_code == 503:
        assert cut.json()["error"]["code"] == "deadline", "it passed before the first token"
    else:
        assert cut.json()["choices"][0]["finish_reason"] == "deadline"
        assert cut.json()["usage"]["completion_tokens"] < 100


def test_cached_tokens_are_told_and_a_salt_keeps_them_apart(crowded: LiveServer) -> None:
    prompt = list(range(20, 60))

    def cached(**fields: Any) -> int:
        usage = ask(crowded, prompt=prompt, max_tokens=1, **fields).json()["usage"]
        assert usage["prompt_tokens"] == 40
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached() == 0
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0


def test_the_pages_command_prints_a_running_servers_ledger(
    crowded: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = threading.Thread(target=ask, args=(crowded,))
    thread.start()
    try:
        assert cli.run(["pages", "--url", crowded.url, "--admin-key", ADMIN_KEY]) == 0
    finally:
        thread.join()
    text = capsys.readouterr().out
    assert "pages of" in text
    assert "hold no token" in text
    assert cli.run(["pages", "--url", crowded.url, "--admin-key", "not the right one"]) == 2
    assert "401" in capsys.readouterr().err
    assert cli.run(["pages", "--url", "ftp://x", "--admin-key", ADMIN_KEY]) == 2
