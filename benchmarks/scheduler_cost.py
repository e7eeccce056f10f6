"""What one scheduling decision costs the host: schedule, then append each sampled token, without any device.

usage: python benchmarks/scheduler_cost.py [--policy NAME] [--profile]        (about 30 seconds; `--profile`: cProfile)

Prints the median and the 99th percentile of a step of `schedule` plus the `append` of all its tokens, for a growing
number of running requests beside 10,000 waiting ones, and of waiting ones beside 512 running.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections import deque

from jaxserve.clock import MachineClock
from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, SchedulerSection
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import Plan, Request
from jaxserve.scheduling.prefix_cache import root_key
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.setup import build_scheduler

PAGE_SIZE = 16
PROMPT, OUTPUT = 64, 128
STEPS, WARM_STEPS = 300, 100
ROOT = root_key(model="m")


class Load:
    """A scheduler with as many running and waiting requests as asked for; whoever ends is followed by a new one."""

    def __init__(self, policy: str, num_running: int, num_waiting: int) -> None:
        pages = 1 + num_running * -(-(PROMPT + OUTPUT) // PAGE_SIZE) + 1024
        config = EngineConfig(
            cache=CacheSection(page_size=PAGE_SIZE, num_pages=pages, dtype="float32"),
            scheduler=SchedulerSection.model_validate(
                {"max_num_seqs": num_running, "max_num_batched_tokens": num_running + 1024, "policy": policy}
            ),
            execution=ExecutionSection(block_q=32, prefill_buckets=(32,), decode_buckets=(num_running,)),
        )
        self.scheduler: Scheduler = build_scheduler(config, MachineClock())
        self._num_waiting = num_waiting
        self._numbers = itertools.count()
        self._in_flight: deque[Plan] = deque()
        self.refill()

    def refill(self) -> None:
        while self.scheduler.num_waiting < self._num_waiting:
            number = next(self._numbers)
            prompt = [1000 + number * 7919 % 40_000, *range(PROMPT - 1)]
            self.scheduler.add(
                Request(
                    request_id=str(number),
                    token_ids=prompt,
                    prompt_len=PROMPT,
                    params=SamplingParams(tenant=str(number % 50), priority=number % 5),
                    seed=0,
                    max_length=PROMPT + 1 + number * 31 % OUTPUT,
                    end_token_ids=frozenset((2,)),
                    constraints=None,
                    root=ROOT,
                )
            )

    def step(self) -> tuple[float, int]:
        """CPU seconds of one decision and of taking in the tokens of the one before, and how many rows it planned."""
        start = time.thread_time()
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            samples = self._in_flight.popleft().samples
            reasons = self.scheduler.append(samples, [5] * len(samples))
            for request, reason in zip(samples, reasons, strict=True):
                if reason is not None:
                    self.scheduler.finish(request, reason)
        return time.thread_time() - start, 0 if plan is None else len(plan.decodes)


def measure(policy: str, num_running: int, num_waiting: int) -> str:
    load = Load(policy, num_running, num_waiting)
    times, rows = [], []
    for number in range(WARM_STEPS + STEPS):
        seconds, decodes = load.step()
        if number >= WARM_STEPS:
            times.append(seconds)
            rows.append(decodes)
        load.refill()
    milliseconds = sorted(1000 * seconds for seconds in times)
    return (
        f"| {policy} | {num_waiting:,} | {num_running} | {statistics.mean(rows):.0f} | "
        f"{statistics.median(milliseconds):.2f} | {milliseconds[int(0.99 * len(milliseconds))]:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", action="append", choices=["fcfs", "priority", "longest-prefix", "fair"])
    parser.add_argument("--profile", action="store_true", help="512 running beside 10,000 waiting, under cProfile")
    parsed = parser.parse_args()
    if parsed.profile:
        load = Load((parsed.policy or ["fcfs"])[0], 512, 10_000)
        with cProfile.Profile() as profile:
            for _ in range(STEPS):
                load.step()
                load.refill()
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        return
    print("| policy | waiting | slots | decode rows | median ms | 99 % ms |\n| --- | --- | --- | --- | --- | --- |")
    for policy in parsed.policy or ["fcfs", "priority", "longest-prefix", "fair"]:
        for num_running, num_waiting in [(64, 10_000), (256, 10_000), (512, 10_000), (512, 1_000), (512, 100)]:
            print(measure(policy, num_running, num_waiting), flush=True)


if __name__ == "__main__":
    main()
