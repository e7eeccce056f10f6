"""Stored responses belong to the key that asked for them."""

from pathlib import Path

import httpx
from fake_engine import FakeEngine
from live_server import TIMEOUT_S, serving

from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import SecuritySection, ServerSection
from server.engine.async_engine import AsyncEngine

ASK = {"model": "fake", "input": "hi", "max_output_tokens": 2}


def test_one_keys_responses_do_not_exist_for_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a:key-of-a-0123456789\nb:key-of-b-0123456789\n")
    settings = ServerSection(security=SecuritySection(api_keys_file=str(keys)))
    with serving(
        lambda engine: create_app(engine, tokenizer, settings),
        lambda: AsyncEngine(lambda _: FakeEngine()),  # type: ignore[arg-type,return-value]
    ) as live:
        live.wait_until_ready()
        a, b = (
            httpx.Client(
                base_url=live.url, headers={"authorization": f"Bearer key-of-{x}-0123456789"}, timeout=TIMEOUT_S
            )
            for x in "ab"
        )
        with a, b:
            path = f"/v1/responses/{a.post('/v1/responses', json=ASK).json()['id']}"
            for reply in (b.get(path), b.delete(path), b.post(f"{path}/cancel")):
                assert reply.status_code == 404
            continued = {**ASK, "previous_response_id": path.rpartition("/")[2]}
            assert b.post("/v1/responses", json=continued).status_code == 400
            assert a.get(path).status_code == 200
            assert a.post("/v1/responses", json=continued).status_code == 200
