"""What every trial sends: the same requests in the same rhythm, whatever the rate; the simulator's in the same form."""

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.simulation.traces import TracedRequest
from server.bench.arrivals import Process, Rate, draw_arrivals
from server.bench.workload import Workload

SIMULATED_PREFIX_IDS = 1 << 30  # above what is drawn for a prompt's own part


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """The traffic that a promise is made for.

    Attributes:
      least_requests, least_s: a trial sends as many requests as both ask for.
      burstiness: see `draw_arrivals`.
    """

    workload: Workload
    process: Process = "poisson"
    burstiness: float = 1.0
    least_requests: int = 100
    least_s: float = 30.0
    seed: int = 0

    def count(self, rate: float) -> int:
        """Requests of a trial at this rate."""
        return max(self.least_requests, math.ceil(rate * self.least_s))

    def arrivals(self, rate: float, repeat: int) -> tuple[float, ...]:
        """Seconds. Of two rates, the same times but for their scale, as far as the shorter one goes."""
        return draw_arrivals(
            Rate(start=rate, end=rate),
            count=self.count(rate),
            process=self.process,
            burstiness=self.burstiness,
            seed=self.request_seed(repeat),
        )

    def request_seed(self, repeat: int) -> int:
        return self.seed + 1000 * repeat


def simulated_trace(load: PlannedLoad, arrivals: tuple[float, ...], repeat: int) -> list[TracedRequest]:
    """The load for the simulator: lengths in place of texts. Of conversations, only first turns."""
    workload = load.workload
    rng = np.random.default_rng(load.request_seed(repeat))
    return [_traced(workload, arrival, number, rng) for number, arrival in enumerate(arrivals)]


def _traced(workload: Workload, arrival: float, number: int, rng: np.random.Generator) -> TracedRequest:
    prompt, output = workload.input_tokens.draw(rng), workload.output_tokens.draw(rng)
    if not workload.prefix_tokens:
        return TracedRequest(arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)
    prefix = int(rng.integers(workload.num_prefixes))
    first = SIMULATED_PREFIX_IDS + prefix * workload.prefix_tokens
    own = rng.integers(SIMULATED_PREFIX_IDS, size=prompt).tolist()
    return TracedRequest(
        arrival_s=arrival,
        prompt_token_ids=(*range(first, first + workload.prefix_tokens), *own),
        output_tokens=output,
    )
