"""One measurement: warms up, sends a load under watch, sums it up; does not know why that load."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from server.bench.load import ClosedLoop, Conversation, Progress, Target, run_load
from server.bench.report import Report, summarize
from server.bench.result import Result
from server.bench.slo import Promise
from server.bench.watch import Watch, watching

WARMUP_CONCURRENCY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is sent, and when.

    Attributes:
      name: in words: "4 users", "2 req/s".
      level: the number that loads are ordered by.
      arrivals, requests, max_concurrency: see `run_load`; `requests` is read once.
      warmup: sent before, up to four at once, and not measured.
      full_length: every reply is wanted as long as it may be; one that ends before is told of.
    """

    name: str
    level: float
    arrivals: Sequence[float] | ClosedLoop
    requests: Iterable[Conversation]
    max_concurrency: int | None = None
    warmup: Sequence[Conversation] = ()
    full_length: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A measurement with all that it rests on."""

    report: Report
    results: Sequence[Result]
    watch: Watch


async def measure(
    target: Target,
    load: Load,
    *,
    server: str,
    promises: Sequence[Promise] = (),
    progress: Progress | None = None,
) -> Run:
    """Runs one load against one server.

    Args:
      server: what the report calls it.
      promises: those without a percentile decide which requests are good.
      progress: kept up to date; the warm-up is not in it.
    """
    if load.warmup:
        await run_load(target, ClosedLoop(concurrency=WARMUP_CONCURRENCY), load.warmup)
    is_open = not isinstance(load.arrivals, ClosedLoop)
    # Drawn before the clock starts: making a prompt takes time, too. A closed loop's may be endless.
    requests = (
        list(islice(load.requests, len(load.arrivals))) if not isinstance(load.arrivals, ClosedLoop) else load.requests
    )
    if is_open and progress is not None:
        progress.total = sum(len(conversation.turns) for conversation in requests)
    with _without_collections():
        async with watching(target.http) as watch:
            results = await run_load(
                target, load.arrivals, requests, max_concurrency=load.max_concurrency, progress=progress
            )
    results.sort(key=lambda result: result.index)
    report = summarize(
        results,
        watch,
        server=server,
        model=target.model,
        load=load.name,
        level=load.level,
        is_open=is_open,
        duration_s=load.arrivals.duration_s if isinstance(load.arrivals, ClosedLoop) else None,
        full_length=load.full_length,
        promises=[promise for promise in promises if promise.percent is None],
    )
    return Run(report=report, results=results, watch=watch)


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collection meanwhile: with ten thousand results it stops the client for tens of milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
