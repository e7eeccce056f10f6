"""What every trial sends: the same requests in the same rhythm, whatever the rate; the simulator's in the same form."""

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.simulation.traces import TracedRequest
from server.bench.arrivals import Process, Rate, draw_arrivals
from server.bench.workload import Workload

SIMULATED_PREFIX_IDS = 1 << 30  # above what is drawn for a prompt's own part
# At a low rate `least_requests` would take an hour: a trial ends after so many times `least_s`, but for the fewest
# requests of which a percentile can be told.
LONGEST = 4
FEWEST_REQUESTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """The traffic that a promise is made for.

    Attributes:
      least_requests, least_s: a trial sends as many requests as both ask for, within LONGEST times `least_s`.
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
        enough = min(self.least_requests, max(FEWEST_REQUESTS, math.ceil(rate * LONGEST * self.least_s)))
        return max(enough, math.ceil(rate * self.least_s))

    def arrivals(self, rate: float, repeat: int) -> tuple[float, ...]:
        """Seconds; at every rate the same rhythm.

        A hundred arrivals of a Poisson process come at their rate to within 10 % only, and near the knee that decides.
        So they are scaled to last as long as they should: of so many arrivals in such a time, just as likely ones.
        """
        drawn = draw_arrivals(
            Rate(start=rate, end=rate),
            count=self.count(rate),
            process=self.process,
            burstiness=self.burstiness,
            seed=self.request_seed(repeat),
        )
        scale = (len(drawn) - 1) / rate / drawn[-1] if drawn[-1] else 1.0
        return tuple(scale * arrival for arrival in drawn)

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
