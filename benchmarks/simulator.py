"""The simulator against a real run: W1 at two loads, both by the same loop, and the error of what the simulator says.

About 6 minutes with the defaults: the start, 75 s of measuring, and the real runs of 64 requests each. The loads are
shares of what the simulator says the machine could serve, so that they are light and heavy on any.

usage: python benchmarks/simulator.py [--slots 32] [--seconds 75] [--requests 64] [--loads 0.5 1.2]
"""

import argparse
import time

from workloads import w1

from jaxserve.clock import MachineClock
from jaxserve.llm import LLM
from jaxserve.simulation.profiler import profile
from jaxserve.simulation.simulator import replay, simulate
from jaxserve.simulation.traces import TracedRequest, arrival_times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=75.0, help="to measure the step times")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.2], help="of the requests/s it could serve")
    options = parser.parse_args()

    started = time.perf_counter()
    llm = LLM("smollm2-135m", model={"max_model_len": 1024}, scheduler={"max_num_seqs": options.slots})
    print(f"start: {time.perf_counter() - started:.1f} s", flush=True)
    result = profile(llm.engine, budget_s=options.seconds)
    times, run = result.times, result.run
    print(
        f"measured in {options.seconds:.0f} s: {len(times.steps)} points; a real run took "
        f"{run.seconds / run.table_seconds:.3f} of the table, idle {run.idle_share:.1%}, "
        f"host {times.host_seconds * 1e3:.2f} ms a step",
        flush=True,
    )
    config = llm.engine.config
    capacity = simulate(config, times, trace(options.requests, arrivals=[0.0] * options.requests)).requests_per_s
    print("| load | | real | simulated | error |\n| --- | --- | --- | --- | --- |")
    for load in options.loads:
        rate = load * capacity
        requests = trace(options.requests, arrival_times("poisson", rate, options.requests, seed=0))
        begun = time.perf_counter()
        simulated = simulate(config, times, requests)
        simulating_s = time.perf_counter() - begun
        llm.engine.flush_cache()  # the loads have the same prompts, and the simulator begins with nothing
        real = replay(llm.engine, requests, MachineClock())
        label = f"{load:.1f} of capacity, {rate:.2f} requests/s"
        for name, value in VALUES.items():
            measured, predicted = value(real), value(simulated)
            error = predicted / measured - 1
            print(f"| {label} | {name} | {measured:.3f} | {predicted:.3f} | {error:+.1%} |", flush=True)
            label = ""
        print(f"| | steps | {real.steps} | {simulated.steps} | simulated in {simulating_s:.2f} s |", flush=True)


VALUES = {
    "output tokens/s": lambda report: report.output_tokens_per_s,
    "TTFT, mean (s)": lambda report: of(report.ttft).mean,
    "TTFT, median (s)": lambda report: of(report.ttft).p50,
    "TTFT, p95 (s)": lambda report: of(report.ttft).p95,
    "token gap, mean (s)": lambda report: of(report.token_gap).mean,
    "token gap, p95 (s)": lambda report: of(report.token_gap).p95,
    "latency, mean (s)": lambda report: of(report.latency).mean,
    "duration (s)": lambda report: report.duration_s,
}


def of(distribution: object) -> object:
    assert distribution is not None, "no request was served"
    return distribution


def trace(num_requests: int, arrivals: list[float]) -> list[TracedRequest]:
    return [
        TracedRequest(arrival_s=arrival, prompt_token_ids=work.prompt_token_ids, output_tokens=work.output_tokens)
        for arrival, work in zip(arrivals, w1(num_requests), strict=True)
    ]


if __name__ == "__main__":
    main()
