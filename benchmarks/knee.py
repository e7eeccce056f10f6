"""The knee that `jaxserve plan` finds, against every rate tried one after the other.

usage: python benchmarks/knee.py --json knee.json                                 (about 17 minutes on two cores)
       python benchmarks/knee.py --read knee.json --plot docs/images/knee.png     (at once)

One server of the embedded model, one promise, one traffic. First the planner; then a sweep from half to 1.1 times what
the server can do, lowest first, every rate three times. Both offer the same requests in the same rhythm (other texts):
a hundred others would have another knee, and it is the search that is checked. The sweep's knee is where the
percentiles, made to rise with the rate (isotonic regression), cross the limit. `--read` prints the documentation's
table. Needs the extra "bench".
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from server.bench.slo import format_seconds, parse_promise
from server.bench.workload import Range, Workload
from server.config import ServeConfig
from server.planning.live import LiveServer
from server.planning.load import PlannedLoad
from server.planning.search import find_knee
from server.planning.servers import running_server
from server.planning.telling import print_knee, trial_line
from server.planning.trial import Trial

CONFIG = ServeConfig.model_validate({"model": {"max_model_len": 1024}, "scheduler": {"max_num_seqs": 16}})
LOWEST_SHARE, HIGHEST_SHARE = 0.5, 1.1


def traffic(requests: int) -> PlannedLoad:
    lengths = Workload(input_tokens=Range(low=32, high=96), output_tokens=Range(low=8, high=24))
    return PlannedLoad(workload=lengths, least_requests=requests, least_s=20.0)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and requests per second; trials as `jaxserve plan --json` has them."""
    console = Console()
    promise = parse_promise(options.slo)

    def trial(server: LiveServer, rate: float, repeat: int) -> Trial:
        done = server.trial(rate, repeat)
        console.print(trial_line(done), highlight=False, soft_wrap=True)
        return done

    with running_server(CONFIG) as url:
        server = LiveServer(url, traffic(options.requests), [promise], concurrency=32)
        start = time.perf_counter()
        capacity, alone = server.capacity(), server.alone()
        knee = find_knee(lambda rate, repeat: trial(server, rate, repeat), alone=alone, capacity=capacity)
        planner_s = time.perf_counter() - start
        print_knee(console, "the planner", knee, [promise])
        start = time.perf_counter()
        # Around the capacity, not the planner's answer: a sweep must not be steered by what it checks.
        shares = np.arange(LOWEST_SHARE, HIGHEST_SHARE + 1e-9, options.step)
        swept = [trial(server, capacity * share, repeat) for share in shares for repeat in range(options.repeats)]
        sweep_s = time.perf_counter() - start
    return {
        "promise": options.slo,
        "limit_s": promise.limit_s,
        "capacity": capacity,
        "knee": knee.rate,
        "in_doubt": knee.in_doubt,
        "planner_s": planner_s,
        "sweep_s": sweep_s,
        "planner_trials": [asdict(one) for one in knee.trials],
        "sweep_trials": [asdict(one) for one in swept],
    }


def crossing(trials: list[dict[str, Any]], limit_s: float) -> float | None:
    """The rate at which the monotone fit of the percentiles passes the limit, on a logarithmic scale; None: nowhere."""
    rates = sorted({trial["rate"] for trial in trials})
    ratios = [np.mean([np.log(reached(one) / limit_s) for one in trials if one["rate"] == rate]) for rate in rates]
    fitted = rising(ratios)
    if fitted[0] > 0 or fitted[-1] <= 0:
        return None
    return float(np.exp(np.interp(0.0, fitted, np.log(rates))))


def rising(values: list[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [float(np.mean(block)) for block in blocks for _ in block]


def reached(trial: dict[str, Any]) -> float:
    """Seconds."""
    value: float = trial["outcomes"][0]["reached"]["value"]
    return value


def tell(found: dict[str, Any]) -> None:
    """The documentation's table, and the comparison."""
    print("| requests/s | of capacity | planner | sweep |\n| --- | --- | --- | --- |")
    both = [("planner", trial) for trial in found["planner_trials"]] + [("s", trial) for trial in found["sweep_trials"]]
    for rate in sorted({trial["rate"] for _, trial in both}):
        cells = []
        for who in ("planner", "s"):
            of_rate = [trial for whose, trial in both if whose == who and trial["rate"] == rate]
            cells.append(", ".join(format_seconds(reached(trial)) for trial in of_rate))
        print(f"| {rate:.2f} | {rate / found['capacity']:.0%} | {cells[0]} | {cells[1]} |")
    swept = crossing(found["sweep_trials"], found["limit_s"])
    against = "the limit is not crossed" if swept is None else f"{swept:.2f}: {found['knee'] / swept - 1:+.1%}"
    low, high = found["in_doubt"]
    print(f"\n{found['promise']}, capacity {found['capacity']:.2f} requests/s")
    print(f"planner, {len(found['planner_trials'])} trials, {found['planner_s']:.0f} s: {found['knee']:.2f}", end="; ")
    print(f"in doubt from {low:.2f} to {high:.2f}")
    print(f"sweep, {len(found['sweep_trials'])} trials, {found['sweep_s']:.0f} s: {against}")


def draw(found: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="requests/s offered", ylabel=f"{found['promise'].partition('=')[0]}, seconds")
    for name, trials, marker, colour in (
        ("sweep", found["sweep_trials"], "o", "tab:blue"),
        ("planner's trials", found["planner_trials"], "D", "tab:orange"),
    ):
        estimates = [trial["outcomes"][0]["reached"] for trial in trials]
        values = np.array([estimate["value"] for estimate in estimates])
        errors = [values - [one["low"] for one in estimates], [one["high"] for one in estimates] - values]
        rates = [trial["rate"] for trial in trials]
        axes.errorbar(rates, values, yerr=errors, fmt=marker, color=colour, alpha=0.8, markersize=5, label=name)
    axes.axhline(found["limit_s"], color="tab:red", linestyle="--", label=f"promised: {found['promise']}")
    axes.axvline(found["knee"], color="tab:orange", label=f"planner's knee, {found['knee']:.2f}")
    if (swept := crossing(found["sweep_trials"], found["limit_s"])) is not None:
        axes.axvline(swept, color="tab:blue", linestyle=":", label=f"sweep's knee, {swept:.2f}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.2g}")
    axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slo", default="ttft_p95=700ms")
    parser.add_argument("--step", type=float, default=0.1, help="of the sweep, as a share of the capacity")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100, help="of a trial")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="instead of running: what --json wrote")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    found = run(options) if options.read is None else json.loads(options.read.read_text())
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    tell(found)
    if options.plot is not None:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
