"""Traces as a collector would get them, and logs as a shipper would read them."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import httpx
import pytest
from fake_engine import BAD_TOKEN, FakeEngine
from live_server import LiveServer, serving
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine
from server.observability.logs import JsonFormatter, TextFormatter, access_logger
from server.observability.tracing import Tracer, otlp_tracer

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def served(tokenizer: Tokenizer, section: ServerSection | None = None) -> Iterator[LiveServer]:
    with serving(
        lambda engine: create_app(engine, tokenizer, section), lambda: AsyncEngine(lambda _: FakeEngine())
    ) as live:
        live.wait_until_ready()
        yield live


def test_a_sequence_is_one_span_with_queue_prefill_and_decode(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("server.app.otlp_tracer", lambda _: Tracer(exporter))
    monkeypatch.setattr(exporter, "shutdown", lambda: None)
    section = ServerSection.model_validate({"observability": {"otlp_endpoint": "http://collector"}})
    with served(tokenizer, section) as live:
        for prompt, traceparent in (([500], f"00-{TRACE_ID}-{SPAN_ID}-01"), ([BAD_TOKEN], "junk\xff")):
            body = {"model": "fake", "prompt": prompt, "max_tokens": 3}
            headers = [(b"traceparent", traceparent.encode("latin-1"))]
            httpx.post(live.url + "/v1/completions", json=body, headers=headers)
    spans = exporter.get_finished_spans()
    wholes = [span for span in spans if span.name == "llm_request"]
    good, bad = wholes
    assert f"{good.context.trace_id:032x}" == TRACE_ID
    assert f"{good.parent.span_id:016x}" == SPAN_ID
    assert bad.parent is None
    assert good.attributes["gen_ai.usage.output_tokens"] == 3
    assert good.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert (good.status.is_ok, bad.status.is_ok) == (True, False)
    phases = [span for span in spans if span.parent is not None and span.parent.span_id == good.context.span_id]
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert phases[0].start_time == good.start_time
    assert phases[-1].end_time == good.end_time
    for before, after in pairwise(phases):
        assert before.end_time == after.start_time


def test_an_exporter_that_is_not_installed_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.observability.tracing._MISSING", "No module named 'opentelemetry'")
    with pytest.raises(ConfigError, match=r"jaxserve\[otel\]"):
        otlp_tracer("http://collector")


def test_each_request_is_one_line_of_json_with_its_id_and_without_what_could_break_it(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Lines()
    handler.setFormatter(JsonFormatter())
    access_logger.addHandler(handler)
    access_logger.setLevel(logging.INFO)
    try:
        with served(tokenizer) as live:
            lines.clear()
            httpx.get(live.url + "/health", headers={"x-request-id": "mine-1"})
            httpx.get(live.url + "/no%0Asuch%22route?key=secret", headers={"x-request-id": 'a"b'})
    finally:
        access_logger.removeHandler(handler)
        access_logger.setLevel(logging.NOTSET)
    first, second = (json.loads(line) for line in lines)
    assert (first["request_id"], first["path"], first["status"], first["method"]) == ("mine-1", "/health", 200, "GET")
    assert first["duration_ms"] >= 0
    assert (second["status"], second["path"]) == (404, "/no%0Asuch%22route")
    assert second["request_id"] != 'a"b'
    assert not any("secret" in line or "\n" in line for line in lines)


def test_a_line_of_text_shows_the_same_fields() -> None:
    record = logging.LogRecord("jaxserve", logging.INFO, __file__, 1, "request", None, None)
    record.status = 200
    assert TextFormatter().format(record).endswith("INFO jaxserve: request status=200")
