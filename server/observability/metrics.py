"""Counts and times requests for Prometheus, and shows the engine's counters beside them; owns one registry.

Names and meanings are vLLM's where it has the metric, under the prefix `jaxserve:` or, so that dashboards made for vLLM
work as they are, `vllm:`. What only this engine has is always `jaxserve:`. Every sample carries `model_name`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.request import FinishReason
from server.engine.engine_client import EngineClient
from server.observability.recent import RecentLatencies

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Prefix = Literal["jaxserve", "vllm"]

# From a cached prompt on an accelerator to a long one queued on a CPU.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

# Gauges and counters of the engine: name → (field of EngineStats, help).
_GAUGES = {
    "num_requests_running": ("num_running", "Requests that hold pages"),
    "num_requests_waiting": ("num_waiting", "Requests queued for pages or a slot"),
    "pages_total": ("pages_total", "Pages of the KV cache"),
    "pages_free": ("pages_free", "Pages that hold nothing"),
    "pages_active": ("pages_active", "Pages that running requests hold"),
    "pages_cached": ("pages_cached", "Pages kept for prompts to come"),
    "host_pages_total": ("host_pages_total", "Evicted pages that host memory may keep"),
    "host_pages_held": ("host_pages_held", "Evicted pages that host memory keeps"),
    "page_slots_unused": ("page_slots_unused", "Tokens that would still fit the pages that running requests hold"),
}
_COUNTERS = {
    "num_preemptions": ("preemptions_total", "Requests that gave up their pages and will be recomputed"),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of requests that have their first token"),
    "generation_tokens": ("output_tokens_total", "Tokens generated"),
    "prefix_cache_queries": ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens found there"),
    "prefix_cache_evictions": ("prefix_cache_evictions_total", "Cached pages given up for new ones"),
    "host_pages_saved": ("host_pages_saved_total", "Evicted pages that were copied to host memory"),
    "host_pages_unsaved": ("host_pages_unsaved_total", "Evicted pages lost since a step had no more copies for them"),
    "host_pages_restored": ("host_pages_restored_total", "Pages that came back from host memory"),
    "host_hits": ("host_hits_total", "Times that a prompt went on from pages in host memory"),
    "compilations": ("compilations_total", "Programs compiled since the start"),
    "compilations_after_ready": ("compilations_after_ready", "Programs compiled in traffic: should be 0"),
    "steps": ("steps_total", "Steps of the engine"),
    "step_tokens": ("step_tokens_total", "Tokens that steps computed"),
    "step_token_slots": ("step_token_slots_total", "Tokens that the steps' shapes had room for: the rest is padding"),
    "host_idle_seconds": ("device_wait_seconds_total", "Seconds that the host waited for the device"),
}
_OF_VLLM = frozenset(
    (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRecord:
    """One sequence, from its arrival to its end; times by `time.perf_counter`.

    Attributes:
      queue_s: from the engine's queue to its first step; None if it never came to one token.
      first_token_time: None if there was none.
    """

    request_id: str
    arrival_time: float
    end_time: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int = 0
    queue_s: float | None = None
    first_token_time: float | None = None


class Metrics:
    """The server's own counters and histograms; one per app, so that two apps in a process do not mix.

    Every accepted sequence ends in exactly one finish reason, so `requests_accepted` is the sum of `request_success`
    over its reasons and of what is still open.
    """

    def __init__(self, engine: EngineClient, prefix: Prefix = "jaxserve") -> None:
        registry = CollectorRegistry()
        self._accepted = Counter(
            "requests_accepted", "Sequences that were handed to the engine, each of n counted", registry=registry
        )
        self._ended = Counter(
            "request_success", "Sequences that ended, by their finish reason", ["finished_reason"], registry=registry
        )
        for reason in get_args(FinishReason):
            self._ended.labels(reason)  # shown as 0 from the start, so that a first one is an increase
        self._refused = Counter("requests_refused", "Requests refused before anything was queued", registry=registry)
        self._disconnects = Counter(
            "client_disconnects", "Sequences whose client left first; they end as aborted", registry=registry
        )

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token, once a sequence", SECONDS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between a sequence's tokens, as they leave the engine", SHORT_SECONDS
        )
        self._end_to_end = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of a sequence", SECONDS
        )
        self._queue = histogram("request_queue_time_seconds", "From the engine's queue to the first step", SECONDS)
        self._step = histogram("step_time_seconds", "Of one step, from its plan to its tokens", SHORT_SECONDS)
        self._lag = histogram(
            "detokenizer_lag_seconds", "From the end of a step to the event loop taking up its tokens", SHORT_SECONDS
        )
        self.on_end: Callable[[SequenceRecord], None] = lambda sequence: None
        self.recent: RecentLatencies | None = None  # only while somebody watches
        engine.on_step_end = self._observe_step
        self._shown = _Named(registry, engine, prefix)

    def accept(self, amount: int) -> None:
        self._accepted.inc(amount)

    def end(self, sequence: SequenceRecord) -> None:
        """Counts a sequence's end; call it once for each that was accepted."""
        self._ended.labels(sequence.finish_reason).inc()
        self._end_to_end.observe(sequence.end_time - sequence.arrival_time)
        self.on_end(sequence)

    def disconnect(self, amount: int) -> None:
        """Counts sequences whose client left; their end is still to be told."""
        self._disconnects.inc(amount)

    def observe_first_token(self, seconds: float, queue_s: float | None) -> None:
        self._first_token.observe(seconds)
        if self.recent is not None:
            self.recent.first_token.add(seconds)
        if queue_s is not None:
            self._queue.observe(queue_s)

    def observe_inter_token(self, seconds: float, amount: int) -> None:
        """`amount` tokens that came together, `seconds` apart on the mean."""
        for _ in range(amount):
            self._inter_token.observe(seconds)
        if self.recent is not None and amount:
            self.recent.token_gap.add(seconds)

    def refuse(self) -> None:
        self._refused.inc()

    def render(self) -> bytes:
        return generate_latest(self._shown)

    def names(self) -> set[str]:
        """Every sample's name, as Prometheus sees it."""
        return {sample.name for metric in self._shown.collect() for sample in metric.samples}

    def _observe_step(self, step_s: float, lag_s: float) -> None:
        self._step.observe(step_s)
        self._lag.observe(lag_s)


class _Named(CollectorRegistry):
    """Everything under its prefix and with its model, at the moment when Prometheus asks."""

    def __init__(self, inner: CollectorRegistry, engine: EngineClient, prefix: Prefix) -> None:
        super().__init__()
        inner.register(_EngineCollector(engine))
        self._inner = inner
        self._engine = engine
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        labels = {} if self._engine.model_name is None else {"model_name": self._engine.model_name}
        for metric in self._inner.collect():
            prefix = self._prefix if metric.name in _OF_VLLM else "jaxserve"
            metric.name = f"{prefix}:{metric.name}"
            metric.samples = [
                sample._replace(name=f"{prefix}:{sample.name}", labels={**labels, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


class _EngineCollector(Collector):
    """Reads the engine's counters when Prometheus asks; before ready there are none."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        if stats is None:
            return
        for name, (field, help_text) in _GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=getattr(stats, field))
        yield GaugeMetricFamily(
            "kv_cache_usage_perc",
            "Share of the pages that requests hold, 0 to 1",
            stats.pages_active / stats.pages_total,
        )
        for name, (field, help_text) in _COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=getattr(stats, field))

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering reads nothing."""
        return iter(())
