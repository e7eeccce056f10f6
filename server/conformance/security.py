"""Security: what the public sends to such servers. No reply is a 5xx, none tells its insides."""

import asyncio
import gzip
import json
from typing import Any

from server.conformance.case import Case, SkippedError, expect
from server.conformance.client import CHAT, COMPLETIONS, LEAKS, Server, check_error, shorten

KIND = "security"
CLIENT_ERRORS = (400, 404, 405, 411, 413, 414, 415, 422, 431)

BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    ("no JSON", b"{not json"),
    ("nothing", b""),
    ("a list", b"[]"),
    ("a string", b'"x"'),
    ("null", b"null"),
    ("text after the JSON", b'{"prompt": "x"} {"prompt": "y"}'),
    ("no UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("a hundred thousand brackets", b"[" * 100_000),
    ("brackets in a field", b'{"model": "m", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    ("a number of ten thousand digits", b'{"model": "m", "prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}"),
)


def _bad_body(body: bytes) -> Any:
    async def run(server: Server) -> None:
        await server.refused(COMPLETIONS, body, *CLIENT_ERRORS)

    return run


async def _unknown_model(server: Server) -> None:
    await server.refused(CHAT, server.chat_body(model="no-such-model"), 400, 404, names="model")


async def _traversal(server: Server) -> None:
    for model in ("../../../etc/passwd", "/etc/passwd", "..\\..\\windows", "http://127.0.0.1/x", "x\x00y"):
        error = await server.refused(CHAT, server.chat_body(model=model), 400, 404, 422)
        expect("root:" not in json.dumps(error), "the error holds a file")


async def _traversal_in_the_path(server: Server) -> None:
    answer = await server.raw(b"GET /v1/models/../../../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    status = answer.split(b" ", 2)[1:2]
    expect(b"root:" not in answer and status not in ([b"200"], [b"500"]), f"answered {answer[:60]!r}")


async def _unknown_route(server: Server) -> None:
    reply = await server.http.get("/v1/no/such/route")
    expect(reply.status_code in (401, 404), f"answered {reply.status_code}")
    expect(LEAKS.search(reply.text) is None, f"the error tells its insides: {shorten(reply.text)}")


async def _wrong_method(server: Server) -> None:
    for method in ("GET", "PUT", "DELETE"):
        reply = await server.http.request(method, CHAT)
        expect(reply.status_code in (404, 405), f"{method} {CHAT} answered {reply.status_code}")


async def _injected_header(server: Server) -> None:
    body = json.dumps(server.completion_body(max_tokens=1)).encode()
    answer = await server.raw(server.raw_post(COMPLETIONS, body, {"x-request-id": "a\nset-cookie: x=1\nb"}))
    head = answer.partition(b"\r\n\r\n")[0].lower()
    expect(b"set-cookie" not in head, f"the reply carries an injected header: {head[:200]!r}")
    expect(b" 500 " not in head[:20], f"answered {head[:40]!r}")


async def _odd_request_id(server: Server) -> None:
    body = json.dumps(server.completion_body(max_tokens=1)).encode()
    for value in ("é\xff\xfe", "x" * 10_000, "<script>alert(1)</script>", "%0d%0aset-cookie:%20x=1"):
        answer = await server.raw(server.raw_post(COMPLETIONS, body, {"x-request-id": value}))
        expect(not answer.startswith(b"HTTP/1.1 5"), f"x-request-id {value[:30]!r}: {answer[:40]!r}")
        head = answer.partition(b"\r\n\r\n")[0]
        expect(value.encode("latin-1") not in head, f"x-request-id {value[:30]!r} came back as it is")


async def _odd_key(server: Server) -> None:
    body = json.dumps(server.completion_body(max_tokens=1)).encode()
    for value in ("Bearer \xff\xfe\xe9", "Bearer", "Bearer ", "Basic eDp5", "\x01"):
        answer = await server.raw(server.raw_post(COMPLETIONS, body, {"authorization": value}))
        expect(not answer.startswith(b"HTTP/1.1 5"), f"authorization {value!r}: {answer[:40]!r}")


async def _without_a_key(server: Server) -> None:
    if server.api_key is None:
        raise SkippedError("run with --api-key")
    for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}):
        for path in (COMPLETIONS, CHAT):
            reply = await server.http.post(path, json=server.body(path), headers=headers)
            check_error(reply, 401, 403)
    reply = await server.http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    expect(reply.status_code in (401, 403), f"/v1/models without a key answered {reply.status_code}")


async def _long_header(server: Server) -> None:
    body = json.dumps(server.completion_body(max_tokens=1)).encode()
    answer = await server.raw(server.raw_post(COMPLETIONS, body, {"x-padding": "x" * 1_000_000}))
    expect(not answer.startswith(b"HTTP/1.1 5"), f"answered {answer[:40]!r}")
    await server.completion(max_tokens=1)


async def _compression_bomb(server: Server) -> None:
    bomb = gzip.compress(b'{"model": "m", "prompt": "' + b"x" * 50_000_000 + b'"}')
    answer = await server.raw(server.raw_post(COMPLETIONS, bomb, {"content-encoding": "gzip"}), wait_s=30)
    status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
    expect(400 <= status < 500, f"50 MB in {len(bomb)} bytes: {answer[:60]!r}")


async def _huge_body(server: Server) -> None:
    head = server.raw_post(COMPLETIONS, b"", {"content-length": str(10**12)})
    answer = await server.raw(head + b"{", wait_s=5)
    expect(not answer.startswith(b"HTTP/1.1 5"), f"a declared terabyte: {answer[:60]!r}")


async def _no_http(server: Server) -> None:
    for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n\r\n", b"\x00" * 4096):
        answer = await server.raw(nonsense, wait_s=2)
        expect(not answer.startswith(b"HTTP/1.1 5"), f"{nonsense[:10]!r}: {answer[:40]!r}")
    await server.completion(max_tokens=1)


async def _slow_clients(server: Server) -> None:
    head = server.raw_post(COMPLETIONS, b"", {"content-length": "100"})
    slow = [asyncio.create_task(server.raw(head[: 20 + i], wait_s=5)) for i in range(40)]
    await asyncio.sleep(0.2)
    await asyncio.wait_for(server.completion(max_tokens=1), 20)
    await asyncio.gather(*slow)


async def _reader_that_never_reads(server: Server) -> None:
    body = json.dumps(server.chat_body(stream=True, max_tokens=32)).encode()
    stuck = [asyncio.create_task(_send_and_hold(server, server.raw_post(CHAT, body))) for _ in range(4)]
    await asyncio.sleep(0.2)
    await asyncio.wait_for(server.completion(max_tokens=4), 30)
    await asyncio.gather(*stuck)


async def _send_and_hold(server: Server, request: bytes) -> None:
    host = server.http.base_url
    _, writer = await asyncio.open_connection(host.host, host.port or 80)
    writer.write(request)
    await writer.drain()
    await asyncio.sleep(3)
    writer.close()


async def _many_stops(server: Server) -> None:
    reply = await server.http.post(COMPLETIONS, json=server.completion_body(stop=["x" * 50] * 20_000))
    expect(reply.status_code in (400, 413, 422), f"20,000 stop strings: {reply.status_code}")


async def _huge_n(server: Server) -> None:
    await server.refused(COMPLETIONS, server.completion_body(n=10**6), names="n")


async def _huge_bias(server: Server) -> None:
    bias = {str(i): 1 for i in range(200_000)}
    reply = await server.http.post(COMPLETIONS, json=server.completion_body(logit_bias=bias, max_tokens=1))
    expect(reply.status_code < 500, f"200,000 biases: {reply.status_code}")


async def _duplicate_keys(server: Server) -> None:
    body = f'{{"model": "{server.model}", "prompt": "x", "max_tokens": 1, "max_tokens": 2, "temperature": 0}}'
    reply = await server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    expect(reply.status_code in (200, 400, 422), f"answered {reply.status_code}")


async def _no_cors_by_default(server: Server) -> None:
    reply = await server.http.get("/v1/models", headers={"origin": "https://evil.example"})
    allowed = reply.headers.get("access-control-allow-origin")
    expect(allowed is None, f"any site may call this server: access-control-allow-origin is {allowed}")


CASES = (
    *(Case(kind=KIND, claim=f"a body that is {what} is refused", run=_bad_body(body)) for what, body in BAD_BODIES),
    *(
        Case(kind=KIND, claim=claim, run=run)
        for claim, run in (
            ("an unknown model is refused by name", _unknown_model),
            ("a model that is a path reaches no file", _traversal),
            ("a route that is a path reaches no file", _traversal_in_the_path),
            ("an unknown route is a 404 without insides", _unknown_route),
            ("a wrong method is a 405", _wrong_method),
            ("a request id injects no header", _injected_header),
            ("odd request ids are never copied into the reply", _odd_request_id),
            ("odd keys are no server error", _odd_key),
            ("nothing is served without the key", _without_a_key),
            ("a header of a megabyte is no server error", _long_header),
            ("a compression bomb is refused", _compression_bomb),
            ("a declared terabyte is no server error", _huge_body),
            ("what is no HTTP does no harm", _no_http),
            ("slow clients hold up nobody", _slow_clients),
            ("readers that never read hold up nobody", _reader_that_never_reads),
            ("20,000 stop strings are refused", _many_stops),
            ("n of a million is refused", _huge_n),
            ("200,000 biases are no server error", _huge_bias),
            ("keys that stand twice are no server error", _duplicate_keys),
            ("other sites may not call by default", _no_cors_by_default),
        )
    ),
)
