"""Serves requests with an engine in real time, without HTTP or text, and keeps what became of each."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.engine import Engine
from jaxserve.request import SamplingParams


@dataclass(kw_only=True)
class Item:
    """One request, and what became of it. `stop_at`: tokens after which its client hangs up; None lets it run out.

    `then` makes the item that follows when this one has ended, from its output.
    """

    arrival_s: float
    prompt: list[int]
    max_tokens: int
    tenant: str = ""
    stop_at: int | None = None
    then: Callable[[list[int], float], "Item"] | None = None
    output: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.arrival_s

    @property
    def latency_s(self) -> float:
        return self.token_times[-1] - self.arrival_s

    @property
    def worst_gap_s(self) -> float:
        return max(np.diff(self.token_times), default=0.0)


@dataclass(kw_only=True)
class Run:
    """A finished workload: its requests, its seconds, the page waste of each step and how long that step took."""

    items: list[Item]
    seconds: float
    waste: float
    preemptions: int
    peak_running: int

    @property
    def tokens_per_s(self) -> float:
        return sum(len(item.output) for item in self.items) / self.seconds

    def mean_ttft_s(self) -> float:
        return float(np.mean([item.ttft_s for item in self.items]))


def drive(engine: Engine, items: Iterable[Item]) -> Run:
    """Serves the items as they arrive, in real time."""
    pending = sorted(items, key=lambda item: item.arrival_s)
    served: list[Item] = []
    live: dict[str, Item] = {}
    waste = waste_time = 0.0
    peak_running = 0
    start = last = time.perf_counter()
    while pending or engine.has_work():
        now = time.perf_counter() - start
        while pending and pending[0].arrival_s <= now:
            item = pending.pop(0)
            name = str(len(served))
            served.append(item)
            live[name] = item
            params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True, tenant=item.tenant)
            engine.add(name, item.prompt, params)
        if not engine.has_work():
            time.sleep(max(0.0, pending[0].arrival_s - now))
            continue
        outputs = engine.step()
        moment = time.perf_counter()
        stats = engine.stats()
        slots = stats.pages_active * engine.config.cache.page_size
        if slots:
            waste += (moment - last) * stats.page_slots_unused / slots
            waste_time += moment - last
        last = moment
        peak_running = max(peak_running, stats.num_running)
        for output in outputs:
            running = live.get(output.request_id)
            if running is None:
                continue
            running.output += output.token_ids
            running.token_times += [moment - start] * len(output.token_ids)
            running.cached_tokens = max(running.cached_tokens, output.num_cached_tokens)
            hangs_up = running.stop_at is not None and len(running.output) >= running.stop_at
            if output.finish_reason is not None or hangs_up:
                del live[output.request_id]
                engine.abort(output.request_id)
                if running.then is not None:
                    pending.insert(0, running.then(running.output, moment - start))
    return Run(
        items=served,
        seconds=last - start,
        waste=waste / max(waste_time, 1e-9),
        preemptions=engine.stats().preemptions_total,
        peak_running=peak_running,
    )
