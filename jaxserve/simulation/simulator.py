"""Runs the real engine and scheduler on a virtual clock against a step-time table; owns no policy of its own."""

import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxserve.clock import Clock, VirtualClock
from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape, choose_shape, step_shapes
from jaxserve.engine import Engine, EngineStats
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.scheduling.plan import Plan, Request
from jaxserve.simulation.null_runner import NullRunner
from jaxserve.simulation.step_times import StepTimes
from jaxserve.simulation.traces import TracedRequest
from models.config import ModelConfig

NUM_TOKEN_IDS = 2**31 - 1  # whatever ids a trace holds, and enough for prompts that share nothing by chance
# The engine reads a model's vocabulary only; what the model costs stands in the table.
_MODEL = ModelConfig(
    architecture="simulated",
    vocab_size=NUM_TOKEN_IDS,
    hidden_size=1,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    max_position=2**31 - 1,
)
STUCK_S = 3600.0  # without an output while requests are there: longer than any prompt or policy takes
TINY_S = 1e-9  # instead of a duration of nothing, where every request was refused


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Of seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Iterable[float]) -> "Distribution | None":
        """None where there is nothing to describe."""
        values = np.asarray(seconds if isinstance(seconds, array) else list(seconds), np.float64)
        if not values.size:
            return None
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return Distribution(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(values.max()))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRequest:
    """One request of the trace that was served to its end; moments in seconds after the trace began.

    Attributes:
      queue_s: from its arrival to its first step.
    """

    arrival_s: float
    queue_s: float
    first_token_s: float
    finish_s: float
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a trace would see.

    Attributes:
      duration_s: from the beginning of the trace to its last token.
      refused: requests that were not served to their end, by the reason.
      output_tokens_per_s, requests_per_s: over the whole duration.
      ttft: from the arrival of each served request to its first token; `token_gap` between its tokens, `latency` to its
        last one.
      busy_share: of the duration that a simulated device was at work.
      pages_peak, pages_mean: pages that requests held, the mean over time.
      cached_tokens: prompt tokens found in the prefix cache, on the device or the host.
      pages_saved, pages_restored: copied to host memory and back.
      served: every request that ended well, in the order of their ends.
    """

    duration_s: float
    requests: int
    refused: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft: Distribution | None
    token_gap: Distribution | None
    latency: Distribution | None
    steps: int
    busy_share: float | None
    running_peak: int
    waiting_peak: int
    pages_total: int
    pages_peak: int
    pages_mean: float
    preemptions: int
    pages_saved: int
    pages_restored: int
    served: tuple[ServedRequest, ...]


def simulate(config: EngineConfig, times: StepTimes, trace: Sequence[TracedRequest], *, seed: int = 0) -> Report:
    """Serves a trace in simulated time; the same arguments give the same report.

    A step costs what the table says of its compiled shape and its keys, and the table's `host_seconds` on top. Pages
    that move to host memory and back make it longer by the table's `page_copy`; without that they cost nothing.

    Args:
      config: resolved, without any "auto". Shapes of it that the table does not have are interpolated.
      seed: of the token ids of requests that came without.

    Raises:
      ConfigError: the configuration and the table do not fit.
    """
    clock = VirtualClock()
    device = _Device(config, times)
    runner = NullRunner(choose=_Outputs(trace).choose, block_q=device.block_q, step_seconds=device.seconds, clock=clock)
    engine = Engine(
        config, _MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset(), clock=clock, step_times=times
    )
    report = replay(engine, trace, clock, seed=seed)
    return replace(report, busy_share=device.busy_s / max(report.duration_s, TINY_S))


def replay(engine: Engine, trace: Sequence[TracedRequest], clock: Clock, *, seed: int = 0) -> Report:
    """Serves a trace with an engine that has no requests; a real one takes as long as the trace.

    Args:
      clock: whose time the report tells; the trace begins now.
      seed: of the token ids of prompts that came without.
    """
    record = _Record(origin=clock.now(), before=engine.stats())
    rng = np.random.default_rng(seed)
    pending = deque(sorted(range(len(trace)), key=lambda number: trace[number].arrival_s))
    heard = clock.now()
    while pending or engine.has_work():
        while pending and trace[pending[0]].arrival_s <= clock.now() - record.origin:
            number = pending.popleft()
            request = trace[number]
            token_ids: Sequence[int] | None = request.prompt_token_ids
            if token_ids is None:
                token_ids = rng.integers(engine.limits.num_token_ids, size=request.prompt_length).tolist()
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.output_length,
                ignore_eos=True,
                priority=request.priority,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                deadline_ms=request.deadline_ms,
            )
            try:
                engine.add(str(number), token_ids, params)
            except JaxserveError as error:
                record.refuse(type(error).__name__)
            else:
                record.open[str(number)] = _Open(arrival_s=request.arrival_s)
        if not engine.has_work():
            if pending:
                clock.wait_until(record.origin + trace[pending[0]].arrival_s)
                heard = clock.now()
            continue
        outputs = engine.step()
        record.add(clock.now(), outputs, engine.stats())
        if outputs:
            heard = clock.now()
        assert clock.now() - heard < STUCK_S, "requests are queued, but none of them ever runs"
    return record.report(len(trace), engine.stats())


def plan_keys(plan: Plan, block_q: int) -> int:
    """The keys that a step's attention reads; see `StepTimes.estimate`."""
    keys = sum(request.num_computed for request in plan.decodes)
    for chunk in plan.chunks:
        end = chunk.start + chunk.count
        keys += sum(min(start + block_q, end) for start in range(chunk.start, end, block_q))
    return keys


class _Device:
    """What each step costs; adds it up."""

    def __init__(self, config: EngineConfig, times: StepTimes) -> None:
        assert isinstance(config.execution.block_q, int), "the configuration is not resolved"
        assert config.execution.decode_buckets != "auto"
        assert config.execution.prefill_buckets != "auto"
        self.block_q = config.execution.block_q
        if self.block_q != times.block_q:
            raise ConfigError(
                f"execution.block_q is {self.block_q}; the step times were measured with {times.block_q} and say "
                "nothing of other blocks"
            )
        self.busy_s = 0.0
        self._times = times
        self._shapes = step_shapes(config.execution.decode_buckets, config.execution.prefill_buckets)

    def seconds(self, plan: Plan) -> float:
        shape = self._shape(plan)
        seconds = self._times.of_shape(shape, plan_keys(plan, self.block_q))
        if plan.copies is not None and self._times.page_copy is not None:
            seconds += len(plan.copies.saved) * self._times.page_copy.save_seconds
            seconds += len(plan.copies.restored) * self._times.page_copy.restore_seconds
        self.busy_s += seconds
        return seconds + self._times.host_seconds

    def _shape(self, plan: Plan) -> StepShape:
        return choose_shape(
            self._shapes, len(plan.decodes), sum(chunk.num_blocks(self.block_q) for chunk in plan.chunks)
        )


class _Outputs:
    """The tokens that each request is given: the trace's, or else such as nobody shares."""

    def __init__(self, trace: Sequence[TracedRequest]) -> None:
        self._token_ids = {str(number): request.output_token_ids for number, request in enumerate(trace)}
        self._unshared = itertools.cycle(range(NUM_TOKEN_IDS))

    def choose(self, request: Request, position: int) -> int:
        token_ids = self._token_ids[request.request_id]
        if token_ids is None:
            return next(self._unshared)
        return token_ids[position - request.prompt_len]


@dataclass(slots=True)
class _Open:
    arrival_s: float
    queue_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class _Record:
    """What happened so far; moments are seconds since `origin`.

    Attributes:
      before: the engine's counters then.
    """

    origin: float
    before: EngineStats
    open: dict[str, _Open] = field(default_factory=dict)
    served: list[ServedRequest] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    last_s: float = 0.0
    page_seconds: float = 0.0
    pages_peak: int = 0
    running_peak: int = 0
    waiting_peak: int = 0

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def add(self, now: float, outputs: Sequence[RequestOutput], stats: EngineStats) -> None:
        now -= self.origin
        self.page_seconds += (now - self.last_s) * stats.pages_active
        self.last_s = now
        self.pages_peak = max(self.pages_peak, stats.pages_active)
        self.running_peak = max(self.running_peak, stats.num_running)
        self.waiting_peak = max(self.waiting_peak, stats.num_waiting)
        for output in outputs:
            request = self.open[output.request_id]
            if output.token_ids:
                if request.output_tokens:
                    self.gaps.append(now - request.last_token_s)
                else:
                    request.first_token_s = now
                    request.queue_s = output.queue_s or 0.0
                request.last_token_s = now
                request.output_tokens += len(output.token_ids)
                request.cached_tokens = max(request.cached_tokens, output.num_cached_tokens)
            if output.finish_reason is not None:
                del self.open[output.request_id]
                if output.finish_reason in ("length", "stop"):
                    self.served.append(
                        ServedRequest(
                            arrival_s=request.arrival_s,
                            queue_s=request.queue_s,
                            first_token_s=request.first_token_s,
                            finish_s=now,
                            output_tokens=request.output_tokens,
                            cached_tokens=request.cached_tokens,
                        )
                    )
                else:
                    self.refuse(output.finish_reason)

    def report(self, num_requests: int, stats: EngineStats) -> Report:
        assert not self.open, f"requests without an end: {list(self.open)[:3]}"
        duration_s = max(self.last_s, TINY_S)
        output_tokens = stats.output_tokens_total - self.before.output_tokens_total
        return Report(
            duration_s=self.last_s,
            requests=num_requests,
            refused=self.refused,
            prompt_tokens=stats.prompt_tokens_total - self.before.prompt_tokens_total,
            output_tokens=output_tokens,
            cached_tokens=sum(request.cached_tokens for request in self.served),
            output_tokens_per_s=output_tokens / duration_s,
            requests_per_s=len(self.served) / duration_s,
            ttft=Distribution.of(request.first_token_s - request.arrival_s for request in self.served),
            token_gap=Distribution.of(self.gaps),
            latency=Distribution.of(request.finish_s - request.arrival_s for request in self.served),
            steps=stats.steps_total - self.before.steps_total,
            busy_share=None,
            running_peak=self.running_peak,
            waiting_peak=self.waiting_peak,
            pages_total=stats.pages_total,
            pages_peak=self.pages_peak,
            pages_mean=self.page_seconds / duration_s,
            preemptions=stats.preemptions_total - self.before.preemptions_total,
            pages_saved=stats.host_pages_saved_total - self.before.host_pages_saved_total,
            pages_restored=stats.host_pages_restored_total - self.before.host_pages_restored_total,
            served=tuple(self.served),
        )
