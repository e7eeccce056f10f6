"""Measures the step-time table on this process's device, and how much of a real run the host keeps it idle."""

import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape, step_shapes
from jaxserve.device.runner import Runner, StepHandle
from jaxserve.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.scheduling.host_tier import Copies
from jaxserve.scheduling.plan import Chunk, Plan, Request
from jaxserve.simulation.simulator import plan_keys
from jaxserve.simulation.step_times import PageCopyTime, StepTime, StepTimes, config_digest

LONGEST_CONTEXT = 2048  # tokens measured at most; a longer context is the same line drawn on
CONTEXT_PARTS = (1, 4, 16)  # of it, or of what max_model_len and the pages allow
STEPS_PER_VISIT = 3  # after one that fills the pipeline
COPIED_PAGES = 32
COPY_VISITS = 5
RUN_SHARE = 0.25  # of the budget, for the real run
GREEDY = SamplingParams(temperature=0.0)

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, kw_only=True, slots=True)
class RealRun:
    """A short run of full batches through the engine.

    Attributes:
      table_seconds: what its steps would take by the table.
      idle_seconds: the device had finished a step and the host had not yet dispatched the next.
    """

    steps: int
    seconds: float
    output_tokens: int
    table_seconds: float
    idle_seconds: float

    @property
    def idle_share(self) -> float:
        return self.idle_seconds / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    times: StepTimes
    run: RealRun


def profile(engine: Engine, *, budget_s: float, report: Progress = lambda what, done, total: None) -> Profile:
    """Measures every compiled shape at a few numbers of keys, then a real run.

    Shapes are visited in turns, so that a slow moment of the machine meets all of them, until three quarters of the
    budget are spent; each is visited once at least.

    Args:
      engine: ready and without requests; what its cache holds is lost.
      budget_s: about how long it may take.
      report: called with ("measuring", done, total) in hundredths of the budget.
    """
    assert not engine.has_work(), "the engine has requests"
    engine.flush_cache()
    start = time.perf_counter()

    def tell() -> None:
        report("measuring", min(100, round((time.perf_counter() - start) / budget_s * 100)), 100)

    config = engine.config
    points = list(_points(engine))
    seconds: dict[_Point, list[float]] = {point: [] for point in points}
    for visit, point in enumerate(itertools.cycle(points)):
        if visit >= len(points) and time.perf_counter() - start > budget_s * (1 - RUN_SHARE):
            break
        seconds[point].append(measure_step(engine.runner, point.plan))
        tell()
    assert isinstance(config.execution.block_q, int)
    times = StepTimes(
        device=jax.devices()[0].device_kind,
        jax_version=jax.__version__,
        model=engine.model_name,
        config_digest=config_digest(config),
        block_q=config.execution.block_q,
        page_copy=_measure_copies(engine, points[0].plan) if config.cache.host_pages else None,
        steps=tuple(
            StepTime(
                decode_rows=point.shape.decode_rows,
                prefill_blocks=point.shape.prefill_blocks,
                kv_tokens=point.keys,
                seconds=statistics.median(measured),
            )
            for point, measured in seconds.items()
        ),
    )
    run = _run(engine, times, budget_s * RUN_SHARE, tell)
    return Profile(times=calibrated(times, run), run=run)


def calibrated(times: StepTimes, run: RealRun) -> StepTimes:
    """The table in agreement with the real run.

    What the run took beyond the table is the host's, of each step alike. If it was faster, so is the whole table.
    """
    fields = times.model_dump()
    if run.seconds >= run.table_seconds:
        fields["host_seconds"] = (run.seconds - run.table_seconds) / run.steps
    else:
        for step in fields["steps"]:
            step["seconds"] *= run.seconds / run.table_seconds
    return StepTimes.model_validate(fields)


def write_trace(engine: Engine, times: StepTimes, folder: Path, *, seconds: float) -> None:
    """Runs full batches for so long under JAX's profiler; Perfetto, TensorBoard and XProf show what it writes."""
    with jax.profiler.trace(folder):
        _run(engine, times, seconds, lambda: None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Point:
    shape: StepShape
    keys: int
    plan: Plan


def _points(engine: Engine) -> Iterator[_Point]:
    execution = engine.config.execution
    assert execution.decode_buckets != "auto"
    assert execution.prefill_buckets != "auto"
    assert isinstance(execution.block_q, int)
    for shape in step_shapes(execution.decode_buckets, execution.prefill_buckets):
        seen = set()
        for part in CONTEXT_PARTS:
            plan = full_plan(engine.config, shape, max(1, _longest_context(engine) // part))
            keys = plan_keys(plan, execution.block_q)
            if keys not in seen:
                seen.add(keys)
                yield _Point(shape=shape, keys=keys, plan=plan)


def _longest_context(engine: Engine) -> int:
    """Tokens that every running request could hold at once."""
    config = engine.config
    assert isinstance(config.cache.page_size, int)
    assert isinstance(config.cache.num_pages, int)
    held = (config.cache.num_pages - 1) * config.cache.page_size // config.scheduler.max_num_seqs
    return max(1, min(LONGEST_CONTEXT, engine.max_model_len - 1, held))


def full_plan(config: EngineConfig, shape: StepShape, context: int) -> Plan:
    """A step that fills the shape: prompts of `context` tokens from their beginning, and decode rows at its end."""
    assert isinstance(config.execution.block_q, int)
    assert isinstance(config.cache.page_size, int)
    assert isinstance(config.cache.num_pages, int)
    page_size, num_pages = config.cache.page_size, config.cache.num_pages
    block_q = config.execution.block_q
    lengths: list[int] = []
    blocks_left = shape.prefill_blocks
    while blocks_left and len(lengths) < config.scheduler.max_num_seqs:
        lengths.append(min(context, blocks_left * block_q))
        blocks_left -= -(-lengths[-1] // block_q)
    rows = min(shape.decode_rows, config.scheduler.max_num_seqs - len(lengths))

    def request(slot: int) -> Request:
        first = slot * -(-context // page_size)
        pages = [1 + (first + i) % (num_pages - 1) for i in range(-(-context // page_size))]
        return Request(
            request_id=f"profile-{slot}",
            token_ids=[0] * context,
            prompt_len=context,
            params=GREEDY,
            seed=0,
            max_length=context + 1,
            end_token_ids=frozenset(),
            constraints=None,
            slot=slot,
            residence=-2 - context,  # no real one is negative, and another context has other pages
            pages=pages,
            num_computed=context,
            prefill_end=context,
        )

    decodes = tuple(request(slot) for slot in range(rows))
    chunks = tuple(Chunk(request=request(rows + i), start=0, count=count) for i, count in enumerate(lengths))
    samplers = (*decodes, *(chunk.request for chunk in chunks if chunk.is_last))
    return Plan(decodes=decodes, chunks=chunks, samples=samplers, positions=(context,) * len(samplers))


def measure_step(runner: Runner, plan: Plan) -> float:
    """Seconds from one step's end to the next one's, the mean of a few, with one in flight as in the engine."""
    first, last = runner.dispatch(plan), runner.dispatch(plan)
    first.read()
    start = time.perf_counter()
    for _ in range(STEPS_PER_VISIT - 1):
        before, last = last, runner.dispatch(plan)
        before.read()
    last.read()
    return (time.perf_counter() - start) / STEPS_PER_VISIT


def _measure_copies(engine: Engine, plan: Plan) -> PageCopyTime:
    """What a step takes longer for each page that moves before it, of as many as are there, up to `COPIED_PAGES`."""
    assert isinstance(engine.config.cache.num_pages, int)
    count = min(COPIED_PAGES, engine.config.cache.host_pages, engine.config.cache.num_pages - 1)
    saved = Copies(saved=tuple((1 + i, i) for i in range(count)), restored=())
    restored = Copies(saved=(), restored=tuple((i, 1 + i) for i in range(count)))
    ways = {"none": plan, "saved": replace(plan, copies=saved), "restored": replace(plan, copies=restored)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    measure_step(engine.runner, ways["saved"])  # so that there is something to restore
    for _ in range(COPY_VISITS):
        for way, step in ways.items():
            seconds[way].append(measure_step(engine.runner, step))
    alone = statistics.median(seconds["none"])
    return PageCopyTime(
        save_seconds=max(0.0, statistics.median(seconds["saved"]) - alone) / count,
        restore_seconds=max(0.0, statistics.median(seconds["restored"]) - alone) / count,
    )


def _run(engine: Engine, times: StepTimes, budget_s: float, tell: Callable[[], None]) -> RealRun:
    """Serves full batches of random requests until the budget is spent."""
    rng = np.random.default_rng(0)
    before = engine.stats()
    limit = max(4, min(engine.max_model_len, engine.limits.longest_sequence))
    runner, watched = engine.runner, _Watched(engine.runner, times)
    engine.runner = watched
    names = (f"profile-{number}" for number in itertools.count())
    added = []
    try:
        start = time.perf_counter()
        while (seconds := time.perf_counter() - start) < budget_s or not watched.table_seconds:
            while not engine.stats().num_waiting:
                # Random tokens: prompts that share nothing are computed whole.
                prompt = rng.integers(engine.limits.num_token_ids, size=rng.integers(1, min(256, limit // 2)))
                params = replace(GREEDY, max_tokens=int(rng.integers(1, min(64, limit // 2))), ignore_eos=True)
                added.append(next(names))
                engine.add(added[-1], prompt.tolist(), params)
            engine.step()
            tell()
        stats = engine.stats()
        idle_seconds = watched.close()
    finally:
        engine.runner = runner
        for name in added:
            engine.abort(name)
        while engine.has_work():
            engine.step()
    return RealRun(
        steps=max(1, stats.steps_total - before.steps_total - 1),
        seconds=seconds,
        output_tokens=stats.output_tokens_total - before.output_tokens_total,
        table_seconds=watched.table_seconds,
        idle_seconds=idle_seconds,
    )


class _Watched:
    """Passes plans on to a runner, and adds up how long the device had nothing to do between them.

    A thread waits for each step beside the engine, which reads one only when it has dispatched the next.
    """

    def __init__(self, runner: Runner, times: StepTimes) -> None:
        self.table_seconds = self._last_step_seconds = 0.0
        self._runner = runner
        self._times = times
        self._idle_seconds = 0.0
        self._dispatched: queue.SimpleQueue[tuple[float, StepHandle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def dispatch(self, plan: Plan) -> StepHandle:
        handle = self._runner.dispatch(plan)
        self._dispatched.put((time.perf_counter(), handle))
        block_q = self._times.block_q
        blocks = sum(chunk.num_blocks(block_q) for chunk in plan.chunks)
        # The engine reads a step once it has dispatched the next one: the last one of all is never waited for.
        self.table_seconds += self._last_step_seconds
        self._last_step_seconds = self._times.estimate(len(plan.decodes), blocks, plan_keys(plan, block_q))
        return handle

    def close(self) -> float:
        """The seconds in all."""
        self._dispatched.put(None)
        self._thread.join()
        return self._idle_seconds

    def _watch(self) -> None:
        done_at: float | None = None
        while (item := self._dispatched.get()) is not None:
            dispatched_at, handle = item
            if done_at is not None:
                self._idle_seconds += max(0.0, dispatched_at - done_at)
            handle.read()
            done_at = time.perf_counter()
