"""Trials on a running server, through the load generator."""

import asyncio
from collections.abc import Sequence
from itertools import islice, pairwise

from rich.console import Console

from server.bench.display import showing
from server.bench.http import HttpClient
from server.bench.load import ClosedLoop, Target
from server.bench.measure import Load, Run, measure
from server.bench.probe import Probe, probe
from server.bench.report import Latencies
from server.bench.slo import Promise
from server.bench.statistics import Distribution
from server.bench.workload import random_conversations
from server.planning.load import PlannedLoad
from server.planning.trial import Evidence, Outcome, Trial

CAPACITY_CONCURRENCY = 64
ALONE_REQUESTS = 10
# Of the replies to users who ask again at once, those in the middle tell the rate: the first and last run in company
# that is not full.
_MIDDLE = (0.2, 0.9)
WARMUP_REQUESTS = 4


class LiveServer:
    """One server, probed once.

    Args:
      url: of a server that is ready.
      concurrency: enough users to keep it full.
      headers: of every request, such as a key.
      console: where each run's progress is shown.
    """

    def __init__(
        self,
        url: str,
        load: PlannedLoad,
        promises: Sequence[Promise],
        *,
        concurrency: int,
        headers: dict[str, str] | None = None,
        console: Console | None = None,
    ) -> None:
        self._url = url
        self._load = load
        self._promises = tuple(promises)
        self._concurrency = concurrency
        self._headers = headers
        self._console = console or Console(quiet=True)
        self._probe = asyncio.run(self._ask())
        self._runs = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the server does not do, where that limits what can be measured."""
        return self._probe.notes

    def capacity(self) -> float:
        """Requests per second that it serves when there are always enough of them."""
        count = max(self._load.least_requests, 3 * self._concurrency)
        users = ClosedLoop(concurrency=self._concurrency)
        run = self._measure("as many as it can", users, count, repeat=-1)
        ends = sorted(result.end_s for result in run.results if result.ok)
        first, last = (int(share * (len(ends) - 1)) for share in _MIDDLE)
        return (last - first) / (ends[last] - ends[first]) if len(ends) > 1 and ends[last] > ends[first] else 0.0

    def alone(self) -> Trial:
        """What a single user sees, who waits for each reply: no rate can promise more."""
        run = self._measure("one user alone", ClosedLoop(concurrency=1), ALONE_REQUESTS, repeat=-1)
        return self._trial(run, rate=0.0)

    def trial(self, rate: float, repeat: int) -> Trial:
        """Offers a rate for a while."""
        name = f"{rate:.2f} requests/s" + (f", repeat {repeat}" if repeat else "")
        run = self._measure(name, self._load.arrivals(rate, repeat), self._load.count(rate), repeat)
        return self._trial(run, rate)

    def _trial(self, run: Run, rate: float) -> Trial:
        report = run.report
        return Trial(
            rate=rate,
            requests=report.requests,
            failure_share=report.failure_share,
            output_tokens_per_s=report.output_tokens_per_s,
            outcomes=tuple(_outcomes(report.latencies, self._promises)),
            evidence=_evidence(run),
        )

    async def _ask(self) -> Probe:
        http = HttpClient(self._url, headers=self._headers)
        try:
            return await probe(http, model=None, api=self._load.workload.api, full_length=True)
        finally:
            await http.close()

    def _measure(self, name: str, arrivals: tuple[float, ...] | ClosedLoop, count: int, repeat: int) -> Run:
        """No two runs send the same texts, or the later would find its prompts cached."""
        self._runs += 1
        # Lengths follow the repeat and texts the run: at two rates the same lengths, and never the same prompt.
        texts = random_conversations(
            self._load.workload,
            self._probe.length,
            seed=self._load.seed + 7919 * self._runs,
            length_seed=self._load.request_seed(repeat + 1),
            prefix_seed=self._load.seed,
        )
        warmup = random_conversations(
            self._load.workload, self._probe.length, seed=2**31 - self._runs, prefix_seed=self._load.seed
        )
        load = Load(
            name=name,
            level=0.0,
            arrivals=arrivals,
            requests=list(islice(texts, count)),
            warmup=list(islice(warmup, WARMUP_REQUESTS)),
        )
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> Run:
        http = HttpClient(self._url, headers=self._headers)
        try:
            target = Target(http=http, model=self._probe.model, extras=self._probe.extras)
            async with showing(self._console, load.name, load) as progress:
                return await measure(target, load, server=self._url, progress=progress)
        finally:
            await http.close()


def _outcomes(latencies: Latencies, promises: Sequence[Promise]) -> list[Outcome]:
    measured: dict[str, Distribution | None] = {
        "ttft": latencies.ttft,
        "itl": latencies.token_gap,
        "tpot": latencies.tpot,
        "e2e": latencies.e2e,
    }
    outcomes = []
    for promise in promises:
        assert promise.percent is not None
        distribution = measured[promise.measure]
        if distribution is not None:  # replies of one token have no gaps
            outcomes.append(Outcome(promise=promise, reached=distribution.percentile(promise.percent)))
    return outcomes


def _evidence(run: Run) -> Evidence:
    report, change = run.report, run.report.server_change
    ttft, gap = report.latencies.ttft, report.latencies.token_gap
    queue_s = change.queue_mean_s if change is not None else None
    return Evidence(
        queue_share=queue_s / ttft.mean if queue_s is not None and ttft is not None and ttft.mean > 0 else None,
        median_gap_s=gap.p50.value if gap is not None else None,
        preemptions=change.preemptions if change is not None else None,
        page_peak=change.max_kv_usage if change is not None else None,
        device_share=_device_share(run),
        client_lag_s=report.client.lag_p99_s,
    )


def _device_share(run: Run) -> float | None:
    """Of the time with requests running, the part that the engine waited for the device; None where nobody tells."""
    waited, running = "host_idle_seconds_total", "num_requests_running"
    samples = [sample for sample in run.watch.samples if waited in sample.values and running in sample.values]
    spans = list(pairwise(samples))
    # Only stretches that were busy at both ends: an engine with nothing to do waits for nobody.
    busy = [(first, last) for first, last in spans if first.values[running] and last.values[running]]
    seconds = sum(last.time_s - first.time_s for first, last in busy)
    return sum(last.values[waited] - first.values[waited] for first, last in busy) / seconds if seconds else None
