"""Life: clients leave, come back, come at once; nothing is left behind and nobody else notices."""

import asyncio
from typing import Any

import httpx

from server.conformance.case import Case, expect
from server.conformance.client import CHAT, COMPLETIONS, Server, shorten

KIND = "life"
LONG = {"max_tokens": 64, "temperature": 1.0}


async def _leave(server: Server, path: str, after_chunks: int, **fields: Any) -> None:
    """Begins a stream and goes away after so many pieces of it."""
    body = server.body(path, **{**LONG, **fields}, stream=True)
    async with server.http.stream("POST", path, json=body) as reply:
        expect(reply.status_code == 200, f"{path} answered {reply.status_code}")
        seen = 0
        async for _ in reply.aiter_raw():
            seen += 1
            if seen >= after_chunks:
                return


async def _leave_unstreamed(server: Server, **fields: Any) -> None:
    body = server.completion_body(**{**LONG, **fields})
    try:
        await server.http.post(COMPLETIONS, json=body, timeout=0.05)
    except httpx.TimeoutException:
        return


async def _leaving_at_once(server: Server) -> None:
    await _leave(server, CHAT, 1)
    await server.wait_until_idle()


async def _leaving_midway(server: Server) -> None:
    await _leave(server, COMPLETIONS, 4)
    await server.wait_until_idle()


async def _leaving_with_choices(server: Server) -> None:
    await _leave(server, CHAT, 2, n=4)
    await server.wait_until_idle()


async def _leaving_unstreamed(server: Server) -> None:
    await _leave_unstreamed(server)
    await server.wait_until_idle()


async def _leaving_unstreamed_with_choices(server: Server) -> None:
    await _leave_unstreamed(server, n=4)
    await server.wait_until_idle()


async def _many_leave(server: Server) -> None:
    await asyncio.gather(*(_leave(server, CHAT, 1 + i % 3) for i in range(12)))
    await server.wait_until_idle()
    await server.chat()


async def _stayers_do_not_notice(server: Server) -> None:
    alone = await server.completion_text(max_tokens=24)
    stay = asyncio.create_task(server.completion_text(max_tokens=24))
    await asyncio.gather(*(_leave(server, CHAT, 1) for _ in range(4)))
    expect(await stay == alone, "an answer changed while others left")


async def _bad_then_good(server: Server) -> None:
    for _ in range(5):
        await server.refused(COMPLETIONS, server.completion_body(prompt=[-5]))
    await server.completion()


async def _one_id_twice(server: Server) -> None:
    headers = {"x-request-id": "conformance-twice"}
    replies = await asyncio.gather(
        *(server.http.post(COMPLETIONS, json=server.completion_body(), headers=headers) for _ in range(2))
    )
    statuses = [reply.status_code for reply in replies]
    expect(200 in statuses and all(status in (200, 400, 409) for status in statuses), f"answered {statuses}")


async def _many_at_once(server: Server) -> None:
    bodies = [server.completion_body(prompt=f"Number {i} is", max_tokens=4 + i % 8) for i in range(32)]
    replies = await asyncio.gather(*(server.http.post(COMPLETIONS, json=body) for body in bodies))
    bad = [reply for reply in replies if reply.status_code not in (200, 429, 503)]
    expect(not bad, f"{len(bad)} of 32 failed: {shorten(bad[0].text) if bad else ''}")
    expect(any(reply.status_code == 200 for reply in replies), "none of 32 was served")


async def _too_long_is_refused_at_once(server: Server) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await server.refused(COMPLETIONS, server.completion_body(prompt="word " * 300_000), 400, 413, 422)
    expect(loop.time() - start < 30, f"it took {loop.time() - start:.0f} s to refuse a prompt that is far too long")


async def _health(server: Server) -> None:
    reply = await server.http.get("/health")
    expect(reply.status_code in (200, 404), f"/health answered {reply.status_code}")


async def _models(server: Server) -> None:
    reply = await server.http.get("/v1/models")
    expect(reply.status_code == 200, f"/v1/models answered {reply.status_code}")
    ids = [model["id"] for model in reply.json()["data"]]
    expect(server.model in ids, f"{server.model} is not among {ids}")


CASES = tuple(
    Case(kind=KIND, claim=claim, run=run)
    for claim, run in (
        ("a client that leaves at the first chunk leaves nothing running", _leaving_at_once),
        ("a client that leaves midway leaves nothing running", _leaving_midway),
        ("a client that leaves four choices leaves nothing running", _leaving_with_choices),
        ("a client that leaves an unstreamed request leaves nothing running", _leaving_unstreamed),
        ("a client that leaves four unstreamed choices leaves nothing running", _leaving_unstreamed_with_choices),
        ("twelve that leave at once leave nothing running", _many_leave),
        ("those who stay do not notice those who leave", _stayers_do_not_notice),
        ("a good request is served after bad ones", _bad_then_good),
        ("two live requests with one id both end", _one_id_twice),
        ("32 at once are served, or told to come back", _many_at_once),
        ("a prompt far beyond the context is refused soon", _too_long_is_refused_at_once),
        ("/health says 200 while requests are served", _health),
        ("/v1/models lists the model", _models),
    )
)
