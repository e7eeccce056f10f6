"""A response whose client has left before it began."""

import asyncio
import json
from typing import Any

import httpx
from fake_engine import FakeEngine

from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.engine.async_engine import AsyncEngine


def test_a_client_that_leaves_before_the_first_event_leaves_no_response_in_progress(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        fake = FakeEngine()
        engine = AsyncEngine(lambda _: fake)  # type: ignore[arg-type,return-value]
        app = create_app(engine, tokenizer)
        async with app.router.lifespan_context(app), asyncio.timeout(20):
            await engine.wait_until_ready()
            body = {"model": "fake", "input": "hi", "stream": True, "max_output_tokens": 10}
            incoming = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]
            scope = {"type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"", "headers": []}

            async def receive() -> Any:
                return incoming.pop(0)

            async def send(_: Any) -> None:
                await asyncio.Event().wait()  # a client that reads nothing

            await app(scope, receive, send)
            while fake.requests or not any(call.startswith("add ") for call in fake.calls):
                await asyncio.sleep(0.001)
            response_id = next(call for call in fake.calls if call.startswith("add ")).split()[1].removesuffix("-0")
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                assert (await client.get(f"/v1/responses/{response_id}")).status_code == 404

    asyncio.run(scenario())
