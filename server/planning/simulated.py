"""Trials on the simulator: the engine's own scheduler against step times, in seconds instead of minutes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.simulation.simulator import Report, simulate
from jaxserve.simulation.step_times import StepTimes
from server.bench.slo import Promise
from server.bench.statistics import Estimate
from server.planning.load import PlannedLoad, simulated_trace
from server.planning.trial import Evidence, Outcome, Trial

CAPACITY_REQUESTS = 300
ALONE_RATE = 1e-3  # requests do not meet


class SimulatedServer:
    """Args:
    config: resolved, without any "auto".
    """

    def __init__(self, config: EngineConfig, times: StepTimes, load: PlannedLoad, promises: Sequence[Promise]) -> None:
        self._config = config
        self._times = times
        self._load = load
        self._promises = tuple(promises)

    def capacity(self) -> float:
        """Requests per second when all are there from the beginning; without the last, which run alone."""
        trace = simulated_trace(self._load, (0.0,) * CAPACITY_REQUESTS, repeat=0)
        report = simulate(self._config, self._times, trace)
        ends = [request.finish_s for request in report.served]
        last = int(0.9 * (len(ends) - 1))
        return last / ends[last] if last > 0 else 0.0

    def alone(self) -> Trial:
        """What a single user sees."""
        return replace(self.trial(ALONE_RATE, 0), rate=0.0)

    def trial(self, rate: float, repeat: int) -> Trial:
        trace = simulated_trace(self._load, self._load.arrivals(rate, repeat), repeat)
        report = simulate(self._config, self._times, trace)
        return Trial(
            rate=rate,
            requests=report.requests,
            failure_share=1 - len(report.served) / report.requests,
            output_tokens_per_s=report.output_tokens_per_s,
            outcomes=tuple(_outcomes(report, self._promises)),
            evidence=Evidence(
                queue_share=_queue_share(report),
                median_gap_s=report.token_gap.p50 if report.token_gap is not None else None,
                preemptions=report.preemptions,
                page_peak=report.pages_peak / report.pages_total,
                device_share=self._device_share(report),
            ),
        )

    def _device_share(self, report: Report) -> float | None:
        busy_s = (report.busy_share or 0.0) * report.duration_s
        all_s = busy_s + report.steps * self._times.host_seconds
        return busy_s / all_s if all_s else None


def _outcomes(report: Report, promises: Sequence[Promise]) -> list[Outcome]:
    measured = {
        "ttft": report.ttft,
        "itl": report.token_gap,
        "e2e": report.latency,
    }
    tpot = [
        (request.finish_s - request.first_token_s) / (request.output_tokens - 1)
        for request in report.served
        if request.output_tokens > 1
    ]
    outcomes = []
    for promise in promises:
        assert promise.percent is not None
        if promise.measure == "tpot":
            value = float(np.percentile(np.array(tpot), promise.percent)) if tpot else None
        else:
            distribution = measured[promise.measure]
            value = None if distribution is None else float(getattr(distribution, f"p{promise.percent}"))
        if value is not None:  # simulated time has no noise, and so no interval
            outcomes.append(Outcome(promise=promise, reached=Estimate(value=value, low=value, high=value)))
    return outcomes


def _queue_share(report: Report) -> float | None:
    if not report.served or report.ttft is None or report.ttft.mean <= 0:
        return None
    return sum(request.queue_s for request in report.served) / len(report.served) / report.ttft.mean
