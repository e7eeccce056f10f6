"""Sums a run up: distributions, rates, failures, what the server and the client went through; draws nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from server.bench.result import Result
from server.bench.slo import Promise, is_good
from server.bench.statistics import Distribution, distribution
from server.bench.watch import Watch

# The client was late if more than one in a hundred of its own timers was, or if it computed nearly all the time.
MAX_LAG_S = 0.02
MAX_CPU_SHARE = 0.85
RATE_TOLERANCE = 0.01
_QUEUE_SUM, _QUEUE_COUNT = "request_queue_time_seconds_sum", "request_queue_time_seconds_count"


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """Of requests that succeeded, in seconds; None where none had any. Failures are beside them, never in them.

    Attributes:
      ttft, e2e: from the time a request was due.
      server_ttft: from the socket.
      token_gap: between tokens; tokens of one chunk share the wait for it.
      chunk_gap: between chunks.
      tpot: a request's mean time per token after its first.
      client_wait: from due to taken up by the client; of all requests.
      connect: from then to the socket; a connection that is used again takes none.
    """

    ttft: Distribution | None
    server_ttft: Distribution | None
    token_gap: Distribution | None
    chunk_gap: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    client_wait: Distribution | None
    connect: Distribution | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChange:
    """What the server's own counters did during the run; None where it has no such counter."""

    preemptions: float | None
    compilations: float | None
    compilations_after_ready: float | None
    queue_mean_s: float | None
    prefix_hit_share: float | None
    max_running: float | None
    max_waiting: float | None
    max_kv_usage: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientHealth:
    """Lateness of the client's event loop, and its use of one core. `limits` say in words where it was the limit."""

    lag_p99_s: float
    lag_max_s: float
    cpu_share: float
    cpu_share_max: float
    limits: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run against one server.

    Attributes:
      server: what the user calls the server.
      load: the load in words: "4 users".
      level: the number that the load goes up by: users, or requests per second.
      offered_rate, achieved_rate: requests per second that were due and that were taken up; None of a closed loop.
      window_s: the time over which rates are: up to the end of a closed loop's duration, else to the last reply.
      failures, oddities: how many requests, by kind.
      failure_details: one message of each kind.
      cached_share: of the prompts' tokens, by the server's usage; None where it does not say.
      goodput_per_s, good_share: of requests that kept all promises; None without promises.
      counted_by: how the tokens of chunks were counted, and of how many requests.
    """

    server: str
    model: str
    load: str
    level: float
    offered_rate: float | None
    achieved_rate: float | None
    requests: int
    succeeded: int
    failures: dict[str, int]
    failure_details: dict[str, str]
    oddities: dict[str, int]
    window_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    prompt_tokens: int | None
    output_tokens: int
    cached_share: float | None
    promises: tuple[str, ...]
    goodput_per_s: float | None
    good_share: float | None
    latencies: Latencies
    counted_by: dict[str, int]
    server_change: ServerChange | None
    client: ClientHealth
    warnings: tuple[str, ...]

    @property
    def failure_share(self) -> float:
        return 1 - self.succeeded / self.requests if self.requests else 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything, with times in seconds."""
        return {**asdict(self), "failure_share": self.failure_share}


def summarize(
    results: Sequence[Result],
    watch: Watch,
    *,
    server: str,
    model: str,
    load: str,
    level: float,
    is_open: bool,
    duration_s: float | None = None,
    full_length: bool = False,
    promises: Sequence[Promise] = (),
) -> Report:
    """Sums up one run.

    Args:
      is_open: arrivals were fixed beforehand, so a rate was offered.
      duration_s: of a closed loop, after which no request begins and nothing counts for the rates.
      full_length: replies were to be as long as they might be.
    """
    served = [result for result in results if result.ok]
    last_end = max((result.end_s for result in results), default=0.0)
    window_s = max(min(last_end, duration_s) if duration_s is not None else last_end, 1e-9)
    offered, achieved = _rates(results) if is_open else (None, None)
    failures = Counter(result.failure for result in results if result.failure is not None)
    oddities = Counter(oddity for result in results for oddity in result.oddities)
    good = [result for result in served if is_good(result, promises)] if promises else None
    has_prompts = bool(served) and all(result.prompt_tokens is not None for result in served)
    output_per_s = _output_tokens_within(served, window_s) / window_s
    ended = [result for result in served if result.end_s <= window_s]
    client = _client_health(watch)
    change = _server_change(watch)
    return Report(
        server=server,
        model=model,
        load=load,
        level=level,
        offered_rate=offered,
        achieved_rate=achieved,
        requests=len(results),
        succeeded=len(served),
        failures={str(kind): count for kind, count in failures.most_common()},
        failure_details={str(result.failure): result.detail for result in reversed(results) if not result.ok},
        oddities=dict(oddities.most_common()),
        window_s=window_s,
        requests_per_s=len(ended) / window_s,
        output_tokens_per_s=output_per_s,
        total_tokens_per_s=output_per_s + sum(_prompt(result) for result in ended) / window_s if has_prompts else None,
        prompt_tokens=sum(_prompt(result) for result in served) if has_prompts else None,
        output_tokens=sum(result.output_tokens for result in served),
        cached_share=_cached_share(served),
        promises=tuple(str(promise) for promise in promises),
        goodput_per_s=None if good is None else sum(result.end_s <= window_s for result in good) / window_s,
        good_share=None if good is None or not results else len(good) / len(results),
        latencies=_latencies(results, served),
        counted_by=dict(Counter(result.counted_by for result in served).most_common()),
        server_change=change,
        client=client,
        warnings=(
            *_warnings(results, served, offered, achieved, client, change),
            *(_short_replies(served) if full_length else ()),
        ),
    )


def _prompt(result: Result) -> int:
    return result.prompt_tokens or 0


def _rates(results: Sequence[Result]) -> tuple[float | None, float | None]:
    """Requests per second that were due, and that were taken up."""
    firsts = [result for result in results if result.turn == 0]

    def rate(times: list[float]) -> float | None:
        span = max(times) - min(times) if times else 0.0
        return (len(times) - 1) / span if span > 0 else None

    offered = rate([result.scheduled_s for result in firsts])
    # Of all at once there is no rate to keep.
    return offered, None if offered is None else rate([result.begun_s for result in firsts])


def _output_tokens_within(served: Sequence[Result], window_s: float) -> float:
    """Tokens that came inside the window; of one that ended in it, all that the server counted."""
    return sum(
        result.output_tokens
        if result.end_s <= window_s
        else sum(chunk.tokens for chunk in result.chunks if chunk.time_s <= window_s)
        for result in served
    )


def _cached_share(served: Sequence[Result]) -> float | None:
    told = [result for result in served if result.cached_tokens is not None]
    prompts = sum(_prompt(result) for result in told)
    return sum(result.cached_tokens or 0 for result in told) / prompts if prompts else None


def _latencies(results: Sequence[Result], served: Sequence[Result]) -> Latencies:
    gaps = [(gap, result.index) for result in served for gap in result.token_gaps()]
    chunk_gaps = [(seconds, result.index) for result in served for seconds in result.chunk_gaps()]
    return Latencies(
        ttft=distribution([result.ttft_s for result in served if result.ttft_s is not None]),
        server_ttft=distribution([result.server_ttft_s for result in served if result.server_ttft_s is not None]),
        token_gap=distribution(
            [gap.seconds for gap, _ in gaps],
            weights=[gap.tokens for gap, _ in gaps],
            owners=[owner for _, owner in gaps],
        ),
        chunk_gap=distribution([seconds for seconds, _ in chunk_gaps], owners=[owner for _, owner in chunk_gaps]),
        tpot=distribution([result.tpot_s for result in served if result.tpot_s is not None]),
        e2e=distribution([result.e2e_s for result in served]),
        client_wait=distribution([result.client_wait_s for result in results]),
        connect=distribution([result.connect_s for result in served if result.connect_s is not None]),
    )


def _server_change(watch: Watch) -> ServerChange | None:
    if len(watch.samples) < 2:
        return None
    first, last = watch.samples[0].values, watch.samples[-1].values

    def change(name: str) -> float | None:
        return last[name] - first.get(name, 0.0) if name in last else None

    def ratio(part: str, whole: str) -> float | None:
        above, below = change(part), change(whole)
        return above / below if above is not None and below else None

    def peak(name: str) -> float | None:
        return max((sample.values[name] for sample in watch.samples if name in sample.values), default=None)

    return ServerChange(
        preemptions=change("num_preemptions_total"),
        compilations=change("compilations_total"),
        compilations_after_ready=change("compilations_after_ready_total"),
        queue_mean_s=ratio(_QUEUE_SUM, _QUEUE_COUNT),
        prefix_hit_share=ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
        max_running=peak("num_requests_running"),
        max_waiting=peak("num_requests_waiting"),
        max_kv_usage=peak("kv_cache_usage_perc"),
    )


def _client_health(watch: Watch) -> ClientHealth:
    lags = np.sort(np.asarray(watch.lags_s or [0.0]))
    shares = watch.cpu_shares or [0.0]
    p99 = float(lags[int(0.99 * (len(lags) - 1))])
    limits = []
    if p99 > MAX_LAG_S:
        limits.append(f"its event loop was {p99 * 1e3:.0f} ms late at p99")
    if (mean := float(np.mean(shares))) > MAX_CPU_SHARE:
        limits.append(f"it kept one core {mean:.0%} busy")
    return ClientHealth(
        lag_p99_s=p99,
        lag_max_s=float(lags[-1]),
        cpu_share=float(np.mean(shares)),
        cpu_share_max=max(shares),
        limits=tuple(limits),
    )


def _warnings(
    results: Sequence[Result],
    served: Sequence[Result],
    offered: float | None,
    achieved: float | None,
    client: ClientHealth,
    change: ServerChange | None,
) -> list[str]:
    """What a reader must know before any number is believed."""
    warnings = []
    if client.limits:
        warnings.append(f"the client was the limit: {' and '.join(client.limits)}; latencies include its own delay")
    if offered and achieved and abs(achieved / offered - 1) > RATE_TOLERANCE:
        warnings.append(
            f"achieved {achieved:.2f} requests/s of the {offered:.2f} offered: {achieved / offered - 1:+.1%}"
        )
    if failed := len(results) - len(served):
        warnings.append(f"{failed} of {len(results)} requests failed; latencies are those of the others")
    if change is not None and change.compilations_after_ready:
        warnings.append(f"the server compiled {change.compilations_after_ready:.0f} programs in traffic")
    return warnings


def _short_replies(served: Sequence[Result]) -> list[str]:
    """Two servers are not compared where one may stop when it likes."""
    if count := sum(result.finish_reason == "stop" for result in served):
        return [f"{count} of {len(served)} replies ended before the length that was asked for (no ignore_eos?)"]
    return []
