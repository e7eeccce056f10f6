"""Tells each sequence's queue, prefill and decode to an OpenTelemetry collector; the packages for it are optional."""

import time
from contextvars import ContextVar

from jaxserve.errors import ConfigError
from server.observability.metrics import SequenceRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    _MISSING: str | None = str(error)
else:
    _MISSING = None

# The W3C trace context that the request being answered came with; "" for none. It is parsed, never repeated.
TRACEPARENT: ContextVar[str] = ContextVar("TRACEPARENT", default="")


class Tracer:
    """One span a sequence, with the phases it went through as children. Spans are sent by a thread of the SDK's."""

    def __init__(self, exporter: "SpanExporter") -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxserve")
        # Spans bear wall-clock times, the records those of a clock that never jumps.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def record(self, sequence: SequenceRecord) -> None:
        """Call it in the context of the request, so that the span joins its trace."""
        parent = TraceContextTextMapPropagator().extract({"traceparent": TRACEPARENT.get()})
        whole = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._at(sequence.arrival_time),
            attributes={
                "gen_ai.request.id": sequence.request_id,
                "gen_ai.usage.input_tokens": sequence.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sequence.num_output_tokens,
                "gen_ai.response.finish_reasons": [sequence.finish_reason],
            },
        )
        if sequence.finish_reason == "error":
            whole.set_status(Status(StatusCode.ERROR))
        for name, start, end in _phases(sequence):
            self._tracer.start_span(name, set_span_in_context(whole), start_time=self._at(start)).end(self._at(end))
        whole.end(self._at(sequence.end_time))

    def close(self) -> None:
        """Sends what waits, for a few seconds at most."""
        self._provider.shutdown()

    def _at(self, perf_counter_s: float) -> int:
        return int(perf_counter_s * 1e9) + self._offset_ns


def otlp_tracer(endpoint: str) -> Tracer:
    """Sends to a collector by OTLP over HTTP. Raises ConfigError where the packages are not installed."""
    if _MISSING is not None:
        raise ConfigError(
            f"server.observability.otlp_endpoint is set, but {_MISSING}; install the extra otel (pip install "
            "'jaxserve[otel]')"
        )
    return Tracer(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"))


def _phases(sequence: SequenceRecord) -> list[tuple[str, float, float]]:
    """Name, start, end. What never came to a token has waited all its time, as far as anybody can tell."""
    first = sequence.first_token_time
    if first is None:
        return [("queue", sequence.arrival_time, sequence.end_time)]
    begin = min(sequence.arrival_time + (sequence.queue_s or 0.0), first)
    return [("queue", sequence.arrival_time, begin), ("prefill", begin, first), ("decode", first, sequence.end_time)]
