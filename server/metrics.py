"""Counts and times requests for Prometheus, and shows the engine's counters beside them; owns one registry."""

from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.async_engine import AsyncEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The engine's finish reasons, and how else a request can end.
Outcome = Literal["stop", "length", "abort", "deadline", "refused", "disconnected", "error"]

# From a cached prompt on an accelerator to a long one queued on a CPU.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

_GAUGES = {
    "jaxserve_requests_running": ("num_running", "Requests that hold pages"),
    "jaxserve_requests_waiting": ("num_waiting", "Requests queued for pages or a slot"),
    "jaxserve_pages_total": ("pages_total", "Pages of the KV cache"),
    "jaxserve_pages_free": ("pages_free", "Pages that hold nothing"),
    "jaxserve_pages_active": ("pages_active", "Pages that running requests hold"),
    "jaxserve_pages_cached": ("pages_cached", "Pages kept for prompts to come"),
    "jaxserve_pages_shared": ("pages_shared", "Pages that several running requests hold"),
    "jaxserve_page_slots_unused": ("page_slots_unused", "Token slots of active pages that hold no token"),
    "jaxserve_waiting_tokens": ("waiting_tokens", "Tokens of the queued requests"),
}
_COUNTERS = {
    "jaxserve_preemptions": ("preemptions_total", "Requests that gave up their pages and will be recomputed"),
    "jaxserve_prefix_cache_queries": ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"),
    "jaxserve_prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens found there, so not computed"),
    "jaxserve_prefix_cache_evictions": ("prefix_cache_evictions_total", "Cached pages given up for others"),
    "jaxserve_compilations": ("compilations_total", "Programs compiled since the start"),
    "jaxserve_compilations_after_ready": ("compilations_after_ready", "Programs compiled in traffic: should be 0"),
    "jaxserve_prompt_tokens": ("prompt_tokens_total", "Prompt tokens of accepted requests"),
    "jaxserve_output_tokens": ("output_tokens_total", "Tokens generated"),
    "jaxserve_steps": ("steps_total", "Steps of the engine"),
}


class Metrics:
    """The server's own counters and histograms; one per app, so that two apps in a process do not mix."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._choices = Counter(
            "jaxserve_requests",
            "Completions by how they ended, each of n counted; a refused request counts once",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in get_args(Outcome):
            self._choices.labels(outcome)  # shown as 0 from the start, so that a first one is an increase
        self._ttft = Histogram(
            "jaxserve_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "jaxserve_inter_token_seconds",
            "Between a completion's tokens, as they leave the engine",
            buckets=INTER_TOKEN_BUCKETS_S,
            registry=self.registry,
        )

    def count(self, outcome: Outcome, amount: int = 1) -> None:
        self._choices.labels(outcome).inc(amount)

    def observe_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's counters when Prometheus asks; before ready there are none."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        if stats is None:
            return
        for name, (field, help_text) in _GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=getattr(stats, field))
        for name, (field, help_text) in _COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=getattr(stats, field))

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering reads nothing."""
        return iter(())
