"""The knee that `jaxserve plan` finds, against every rate tried one after the other.

usage: python benchmarks/knee.py [--step 0.1] [--repeats 2] [--json FILE]      (about 12 minutes on two cores)

One server of the embedded model, one promise. First the planner; then a sweep from half to 1.2 times what the server
can do, lowest first, every rate with `--repeats` other seeds than the planner's. The sweep's knee is where the median
of a rate's p95s crosses the limit, between the two rates around it.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from server.bench.slo import Promise, parse_promise
from server.bench.workload import Range, Workload
from server.config import ServeConfig
from server.planning.live import LiveServer
from server.planning.load import PlannedLoad
from server.planning.search import find_knee
from server.planning.servers import running_server
from server.planning.telling import print_knee, trial_line
from server.planning.trial import Trial

CONFIG = ServeConfig.model_validate({"model": {"max_model_len": 1024}, "scheduler": {"max_num_seqs": 16}})
PROMISE = parse_promise("ttft_p95=1s")
SWEEP_SEED = 1_000_003


def traffic(seed: int, requests: int) -> PlannedLoad:
    lengths = Workload(input_tokens=Range(low=64, high=192), output_tokens=Range(low=16, high=48))
    return PlannedLoad(workload=lengths, least_requests=requests, least_s=20.0, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=0.1, help="of the sweep, as a share of the capacity")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=80, help="of a trial")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    with running_server(CONFIG) as url:
        planner = LiveServer(url, traffic(0, options.requests), [PROMISE], concurrency=32)
        start = time.perf_counter()
        knee = find_knee(told(planner, console), capacity=planner.capacity())
        seconds = time.perf_counter() - start
        print_knee(console, f"the planner, {len(knee.trials)} trials in {seconds:.0f} s", knee, [PROMISE])
        sweeper = LiveServer(url, traffic(SWEEP_SEED, options.requests), [PROMISE], concurrency=32)
        start = time.perf_counter()
        # Around the capacity, not the planner's answer: a sweep must not be steered by what it checks.
        rates = [knee.capacity * (0.5 + options.step * number) for number in range(math.ceil(0.7 / options.step) + 1)]
        trials = {rate: [told(sweeper, console)(rate, repeat) for repeat in range(options.repeats)] for rate in rates}
        print(f"the sweep, {sum(map(len, trials.values()))} trials in {time.perf_counter() - start:.0f} s")
    swept = crossing(trials, PROMISE)
    print(f"planner {knee.rate:.2f} requests/s, sweep {swept:.2f}: {knee.rate / swept - 1:+.1%}")
    if options.json is not None:
        every = [asdict(trial) for repeats in trials.values() for trial in repeats]
        planned = [asdict(trial) for trial in knee.trials]
        found = {"planner": knee.rate, "sweep": swept, "planner_trials": planned, "sweep_trials": every}
        options.json.write_text(json.dumps(found))


def told(server: LiveServer, console: Console) -> Callable[[float, int], Trial]:
    def trial_of(rate: float, repeat: int) -> Trial:
        trial = server.trial(rate, repeat)
        console.print(trial_line(trial), highlight=False, soft_wrap=True)
        return trial

    return trial_of


def crossing(trials: dict[float, list[Trial]], promise: Promise) -> float:
    """Where the median of the repeats first passes the limit, interpolated between the logarithms of the rates."""
    below: tuple[float, float] | None = None
    for rate in sorted(trials):
        ratio = statistics.median(trial.worst_ratio for trial in trials[rate])
        if ratio > 1.0:
            if below is None:
                return rate
            share = math.log(1.0 / below[1]) / math.log(ratio / below[1])
            return below[0] * (rate / below[0]) ** share
        below = (rate, ratio)
    return max(trials)


if __name__ == "__main__":
    main()
