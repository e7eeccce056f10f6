"""Who may ask, how fast, from where; and that no client, however odd or slow, costs others more than a socket."""

import gzip
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trustme
from fake_engine import FakeEngine
from live_server import LiveServer, serving

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizer import Tokenizer
from server.api.admin import ADMIN_ENDPOINTS
from server.api.routes import ENDPOINTS
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.security import connection as connection_module
from server.serve import uvicorn_config

FOREVER = 10**9
TIMEOUT_S = 20.0
KEY, OTHER_KEY, ADMIN_KEY = "key-of-the-web", "key-of-the-batch", "key-of-the-admin"
BODY = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 2}


@contextmanager
def served(
    tokenizer: Tokenizer, settings: dict[str, Any] | None = None, engine: FakeEngine | None = None, **limits: Any
) -> Iterator[LiveServer]:
    section = ServerSection.model_validate({"security": settings or {}, "limits": limits})
    fake = engine or FakeEngine()
    with serving(
        lambda async_engine: create_app(async_engine, tokenizer, section),
        lambda: AsyncEngine(lambda _: fake, request_timeout_s=section.limits.request_timeout_s),
        settings=section,
    ) as live:
        wait_for(lambda: live.engine.state == "ready")
        yield live


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    api, admin = tmp_path / "keys", tmp_path / "admin"
    api.write_text(f"web:{KEY}\nbatch:{OTHER_KEY}\n")
    admin.write_text(f"root:{ADMIN_KEY}\n")
    return {"api_keys_file": str(api), "admin_keys_file": str(admin)}


def wait_for(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(live: LiveServer, headers: Any = None, body: Any = BODY, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(live.url + path, json=body, headers=headers, timeout=TIMEOUT_S)


def connect(live: LiveServer) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(TIMEOUT_S)
    return connection


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body, whole: the two may come in one packet or in two."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


def is_closed(connection: socket.socket) -> bool:
    """Reads to the end."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


# --- keys ---


def test_every_route_but_the_open_ones_asks_for_a_key(tokenizer: Tokenizer, keys: dict[str, str]) -> None:
    with served(tokenizer, keys) as live:
        seen = set()
        for endpoint in (*ENDPOINTS, *ADMIN_ENDPOINTS):
            path = endpoint.path.replace("{model:path}", "fake").replace("{", "").replace("}", "")
            for headers in ({}, bearer("wrong-key"), bearer(KEY) if endpoint in ADMIN_ENDPOINTS else {}):
                reply = httpx.request(endpoint.method, live.url + path, headers=headers, timeout=TIMEOUT_S)
                if endpoint.path in ("/live", "/ready", "/health"):
                    assert reply.status_code == 200
                    continue
                assert reply.status_code == 401, endpoint
                assert reply.headers["www-authenticate"] == "Bearer"
                assert "API key" in reply.json()["error"]["message"]
            seen.add(endpoint.path)
        assert len(seen) > 15
        assert ask(live, bearer("wrong-key"), path="/no/such/route").status_code == 401
        for key in (KEY, OTHER_KEY):
            assert ask(live, bearer(key)).status_code == 200
            assert ask(live, {"x-api-key": key}).status_code == 200
        assert ask(live, bearer(ADMIN_KEY)).status_code == 401


def test_official_clients_show_their_keys_and_see_their_own_errors(tokenizer: Tokenizer, keys: dict[str, str]) -> None:
    with served(tokenizer, keys) as live:
        for key, is_good in ((KEY, True), ("wrong-key", False)):
            with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0) as client:
                if is_good:
                    assert client.models.list().data[0].id == "fake"
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()
        with (
            anthropic.Anthropic(base_url=live.url, api_key="wrong-key", max_retries=0) as claude,
            pytest.raises(anthropic.AuthenticationError),
        ):
            claude.messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "shown",
    [
        b"Bearer",
        b"bearer  \xff\xfe\x80",
        b"Basic abc",
        b"\xc3\xa9",
        b"Bearer " + b"x" * 20_000,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_odd_keys_are_a_401_never_a_500(tokenizer: Tokenizer, keys: dict[str, str], shown: bytes) -> None:
    with served(tokenizer, keys) as live:
        for name in (b"authorization", b"x-api-key"):
            assert httpx.get(live.url + "/v1/models", headers=[(name, shown)]).status_code == 401


def test_a_key_may_hold_any_bytes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    key = "café à"  # ends in a byte that is a space in Latin-1
    (tmp_path / "keys").write_text(f"web:{key}\n")
    with served(tokenizer, {"api_keys_file": str(tmp_path / "keys")}) as live:
        for name, shown in ((b"authorization", b"Bearer " + key.encode()), (b"x-api-key", key.encode())):
            assert httpx.get(live.url + "/v1/models", headers=[(name, shown)]).status_code == 200


def test_no_key_appears_in_logs_or_metrics(
    tokenizer: Tokenizer, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"), served(tokenizer, keys) as live:
        ask(live, bearer(KEY))
        ask(live, bearer("wrong-key"))
        metrics = httpx.get(live.url + "/metrics", headers=bearer(KEY)).text
    for text in (caplog.text, metrics):
        assert KEY not in text
        assert "wrong-key" not in text


# --- admin routes ---


def test_admin_routes_do_not_exist_without_an_admin_key(tokenizer: Tokenizer) -> None:
    with served(tokenizer) as live:
        for endpoint in ADMIN_ENDPOINTS:
            assert httpx.request(endpoint.method, live.url + endpoint.path).status_code == 404


def test_an_admin_sees_the_pages_and_ends_every_request(tokenizer: Tokenizer, keys: dict[str, str]) -> None:
    fake = FakeEngine(max_model_len=2 * FOREVER)
    with served(tokenizer, keys, fake) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
        stream = client.completions.create(model="fake", prompt=[5], max_tokens=FOREVER, stream=True)
        next(iter(stream))
        pages = httpx.get(live.url + "/admin/pages", headers=bearer(ADMIN_KEY)).json()
        assert pages["num_running"] == 1
        reply = httpx.post(live.url + "/admin/abort-all", headers=bearer(ADMIN_KEY))
        assert reply.json() == {"aborted": 1}
        assert list(stream)[-1].choices[0].finish_reason == "abort"


def test_a_profile_goes_only_where_the_configuration_says(
    tokenizer: Tokenizer, keys: dict[str, str], tmp_path: Path
) -> None:
    with served(tokenizer, keys) as live:
        reply = ask(live, bearer(ADMIN_KEY), {"seconds": 0.1}, "/admin/profile")
        assert (reply.status_code, "profile_folder" in reply.text) == (400, True)
    folder = tmp_path / "profiles"
    with served(tokenizer, {**keys, "profile_folder": str(folder)}) as live:
        assert ask(live, bearer(ADMIN_KEY), {"seconds": 0.1, "folder": "/tmp/x"}, "/admin/profile").status_code == 400
        assert ask(live, bearer(ADMIN_KEY), {"seconds": 3600}, "/admin/profile").status_code == 400
        assert ask(live, bearer(ADMIN_KEY), {"seconds": 0.1}, "/admin/profile").status_code == 200
        assert list(folder.rglob("*.pb"))


# --- request ids ---


@pytest.mark.parametrize(
    ("shown", "is_kept"),
    [
        ("abc-1.2_3", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("a b", False),
        ("a;b", False),
        ("é", False),
        ("", False),
    ],
)
def test_a_request_id_is_given_back_if_it_is_plain_and_replaced_if_not(
    tokenizer: Tokenizer, shown: str, is_kept: bool
) -> None:
    with served(tokenizer) as live:
        for path in ("/health", "/no/such/route"):
            reply = httpx.get(live.url + path, headers=[(b"x-request-id", shown.encode("latin-1"))])
            assert (reply.headers["x-request-id"] == shown) is is_kept
            assert reply.headers["x-request-id"]


# --- other origins ---


def test_other_origins_are_answered_only_where_they_are_named(tokenizer: Tokenizer, keys: dict[str, str]) -> None:
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with served(tokenizer) as live:
        reply = httpx.options(live.url + "/v1/completions", headers=preflight)
        assert reply.status_code == 405
        assert not any(
            name.startswith("access-control") for name in ask(live, {"Origin": "https://app.example"}).headers
        )
    with served(tokenizer, {**keys, "cors_origins": ["https://app.example"]}) as live:
        reply = httpx.options(live.url + "/v1/completions", headers=preflight)
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        stranger = httpx.options(live.url + "/v1/completions", headers={**preflight, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
        refused = ask(live, {"Origin": "https://app.example"})  # whose page must be able to read why
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")


# --- rates ---


def test_requests_over_the_rate_are_a_429_that_says_when_and_other_keys_go_on(
    tokenizer: Tokenizer, keys: dict[str, str]
) -> None:
    with served(tokenizer, {**keys, "requests_per_minute": 3}) as live:
        assert [ask(live, bearer(KEY)).status_code for _ in range(4)] == [200, 200, 200, 429]
        reply = ask(live, bearer(KEY))
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(reply.headers["retry-after"]) <= 20
        assert ask(live, bearer(OTHER_KEY)).status_code == 200
        assert httpx.get(live.url + "/health").status_code == 200
        limited = openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0)
        with limited as client, pytest.raises(openai.RateLimitError):
            client.models.list()


def test_tokens_of_prompt_and_output_are_charged_streamed_or_whole(tokenizer: Tokenizer, keys: dict[str, str]) -> None:
    with served(tokenizer, {**keys, "tokens_per_minute": 20}) as live:
        body = {**BODY, "max_tokens": 7, "ignore_eos": True}  # 3 + 7 tokens
        assert ask(live, bearer(KEY), body).status_code == 200
        assert ask(live, bearer(KEY), {**body, "stream": True}).status_code == 200
        reply = ask(live, bearer(KEY), body)
        assert reply.status_code == 429
        assert "tokens a minute" in reply.json()["error"]["message"]
        assert ask(live, bearer(OTHER_KEY), body).status_code == 200


# --- bodies ---


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip", "GZIP"])
def test_compressed_bodies_are_refused_before_they_are_read(tokenizer: Tokenizer, encoding: str) -> None:
    bomb = gzip.compress(b" " * 10**7)
    with served(tokenizer) as live:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        reply = httpx.post(live.url + "/v1/completions", content=bomb, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_an_answer_before_the_body_does_not_end_the_connection_that_serves_the_next_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LINGER_S", 0.3)
    with served(tokenizer) as live, connect(live) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n"
        )
        assert read_answer(connection)[0] == 415
        connection.sendall(b"{}")
        time.sleep(0.6)
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("model", ["../../etc/passwd", "/etc/passwd", "..%2f..%2fetc", "fake\x00", "x" * 9000])
def test_a_model_name_is_compared_and_never_opened(tokenizer: Tokenizer, model: str) -> None:
    with served(tokenizer) as live:
        reply = ask(live, body={**BODY, "model": model})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert len(reply.content) < 400
        reply = httpx.get(live.url + "/v1/models/" + httpx.QueryParams({"m": model})["m"].replace("\x00", "%00"))
        assert reply.status_code == 404
        assert "root:" not in reply.text


def test_no_error_names_a_file_of_the_server(tokenizer: Tokenizer) -> None:
    class Broken(FakeEngine):
        def check_room(self, *_: object, **__: object) -> None:
            raise FileNotFoundError(2, "No such file", "/srv/models/secret.safetensors")

    with served(tokenizer, engine=Broken()) as live:
        assert "/srv" not in ask(live).text


# --- slow clients ---


def test_a_head_that_does_not_come_in_time_ends_the_connection(tokenizer: Tokenizer) -> None:
    with served(tokenizer, header_timeout_s=0.3) as live:
        silent, dripping, second = connect(live), connect(live), connect(live)
        second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(second)[0] == 200
        second.sendall(b"GET /hea")  # the next head on a kept connection is bounded as well
        start = time.monotonic()
        try:
            for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 200:
                dripping.sendall(bytes([byte]))
                time.sleep(0.02)
        except ConnectionError:
            pass
        assert time.monotonic() - start < 3
        for connection in (silent, dripping, second):
            assert is_closed(connection)
            connection.close()
        assert live.get("/health").status_code == 200


def test_a_body_that_does_not_come_in_time_is_a_408_and_its_connection_ends(tokenizer: Tokenizer) -> None:
    with served(tokenizer, body_timeout_s=0.3) as live, connect(live) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        start = time.monotonic()
        status, body = read_answer(connection)
        assert status == 408
        assert b"body_timeout" in body
        try:
            while time.monotonic() - start < 10:  # going on does not keep the connection
                connection.sendall(b" ")
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert time.monotonic() - start < 5


def test_a_client_that_never_reads_loses_its_request(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=2 * FOREVER, step_s=0.002)
    with served(tokenizer, engine=fake, read_timeout_s=0.5) as live, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = live.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        # Many choices fill the sockets' buffers soon.
        body = b'{"model": "fake", "prompt": [500], "max_tokens": 999999999, "n": 100, "stream": true}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_for(lambda: len(fake.requests) == 100)
        wait_for(lambda: not fake.requests)
        assert live.get("/health").status_code == 200


def test_connections_beyond_the_limit_are_closed_and_the_others_served(tokenizer: Tokenizer) -> None:
    with served(tokenizer, max_connections=3) as live, httpx.Client(base_url=live.url) as client:
        assert client.get("/health").status_code == 200
        held = [connect(live) for _ in range(2)]
        time.sleep(0.1)
        with connect(live) as fourth:
            assert is_closed(fourth)
        assert client.get("/health").status_code == 200
        for connection in held:
            connection.close()
        wait_for(lambda: _is_served(live))


def _is_served(live: LiveServer) -> bool:
    try:
        return live.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_heads_over_the_limit_are_refused(tokenizer: Tokenizer) -> None:
    with served(tokenizer, max_header_bytes=4096) as live:
        assert httpx.get(live.url + "/health", headers={"x-long": "a" * 2000}).status_code == 200
        assert httpx.get(live.url + "/health", headers={"x-long": "a" * 9000}).status_code in (400, 431)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 5000,
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\n b\r\n\r\n",
        b"GET /%ff%fe/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda value: repr(value)[:24],
)
def test_junk_on_a_connection_is_answered_or_cut_and_harms_nobody(
    tokenizer: Tokenizer, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tokenizer, header_timeout_s=0.3, body_timeout_s=0.3, keep_alive_s=1) as live:
        with connect(live) as connection:
            connection.sendall(junk)
            assert is_closed(connection)
        assert live.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


def test_a_request_that_takes_too_long_ends_as_aborted(tokenizer: Tokenizer) -> None:
    fake = FakeEngine(max_model_len=2 * FOREVER)
    with served(tokenizer, engine=fake, request_timeout_s=0.3) as live:
        reply = ask(live, body={**BODY, "max_tokens": FOREVER, "n": 2})
        assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["abort", "abort"]
        assert ask(live).json()["choices"][0]["finish_reason"] == "length"


def test_prompts_beyond_what_the_text_threads_can_queue_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda *_, **__: (may_end.wait(), [5])[1])
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with served(tokenizer, max_text_jobs=3) as live, ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(ask, live, None, chat, "/v1/chat/completions") for _ in range(12)]
        wait_for(lambda: sum(reply.done() for reply in replies) == 12 - 3 - 2)
        may_end.set()
        statuses = [reply.result().status_code for reply in replies]
        assert (statuses.count(200), statuses.count(503)) == (5, 7)
        assert ask(live, body=chat, path="/v1/chat/completions").status_code == 200


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = "word " * 20
    too_long = "a" * (tokenizer.max_token_bytes * 64 + 1)  # 64: the fake engine's longest sequence
    with served(tokenizer) as live:
        for path, body in (
            ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 1}),
            ("/v1/completions", lambda text: {"prompt": ["ok", text], "max_tokens": 1}),
            ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ):
            assert ask(live, body={"model": "fake", **body(fits)}, path=path).status_code == 200
            with monkeypatch.context() as patch:
                for name in ("encode", "encode_chat"):
                    patch.setattr(
                        Tokenizer, name, lambda self, text, **_: pytest.fail("tokenized") if len(text) > 99 else [5]
                    )
                reply = ask(live, body={"model": "fake", **body(too_long)}, path=path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


# --- TLS ---


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    paths = {}
    for name, certificate in (
        ("server", authority.issue_cert("127.0.0.1")),
        ("client", authority.issue_cert("client@example.org")),
        ("stranger", stranger.issue_cert("stranger@example.org")),
    ):
        certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
        paths[name] = str(folder / f"{name}.pem")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return {**paths, "ca": str(folder / "ca.pem")}


def secure_get(live: LiveServer, tls: dict[str, str], client: str | None = None) -> httpx.Response:
    context = ssl.create_default_context(cafile=tls["ca"])
    if client is not None:
        context.load_cert_chain(tls[client])
    return httpx.get(live.url.replace("http:", "https:") + "/live", verify=context, timeout=TIMEOUT_S)


@contextmanager
def served_over_tls(tokenizer: Tokenizer, settings: dict[str, str]) -> Iterator[LiveServer]:
    section = ServerSection.model_validate({"security": settings})
    with serving(
        lambda engine: create_app(engine, tokenizer, section),
        lambda: AsyncEngine(lambda _: FakeEngine()),
        settings=section,
    ) as live:
        yield live


def test_tls_is_spoken_and_nothing_else(tokenizer: Tokenizer, tls: dict[str, str]) -> None:
    with served_over_tls(tokenizer, {"tls_certificate": tls["server"], "tls_key": tls["server"]}) as live:
        assert secure_get(live, tls).status_code == 200
        with pytest.raises(httpx.HTTPError):
            live.get("/live")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(live.url.replace("http:", "https:") + "/live")


def test_mutual_tls_takes_only_clients_of_its_authority(tokenizer: Tokenizer, tls: dict[str, str]) -> None:
    settings = {"tls_certificate": tls["server"], "tls_key": tls["server"], "tls_client_ca": tls["ca"]}
    with served_over_tls(tokenizer, settings) as live:
        assert secure_get(live, tls, "client").status_code == 200
        for client in (None, "stranger"):
            with pytest.raises(httpx.HTTPError):
                secure_get(live, tls, client)


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_certificate": "/nowhere.pem", "tls_key": "/nowhere.pem"},
        {"tls_certificate": __file__, "tls_key": __file__},
    ],
)
def test_tls_files_that_cannot_be_used_are_told_with_their_keys(tokenizer: Tokenizer, settings: dict[str, str]) -> None:
    section = ServerSection.model_validate({"security": settings})
    with pytest.raises(ConfigError, match=r"server\.security\.tls"):
        uvicorn_config(create_app(AsyncEngine(lambda _: FakeEngine()), tokenizer, section), section)
