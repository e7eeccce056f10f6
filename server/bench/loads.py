"""Turns a plan into loads for a server: which conversations, when; sends nothing."""

import math
from collections.abc import Iterable, Iterator
from itertools import cycle, islice

from server.bench.arrivals import Rate, draw_arrivals
from server.bench.dataset import Dataset, read_jsonl, read_sharegpt
from server.bench.errors import BenchError
from server.bench.flags import BenchPlan
from server.bench.load import ClosedLoop, Conversation
from server.bench.measure import Load
from server.bench.workload import TokenLength, random_conversations

# Seeds of texts: no two runs share one, or the second would find the first one's prompts in the cache.
_SEEDS_A_RUN = 2


def make_loads(plan: BenchPlan, length: TokenLength) -> list[Load]:
    """The plan's loads in order, for a server with tokens of that length. Raises BenchError."""
    dataset = _dataset(plan, length)
    if plan.trace is not None:
        assert dataset is not None
        return [_trace(plan, dataset, length)]
    loads = []
    levels: tuple[int | Rate, ...] = plan.users or plan.rates
    for number, level in enumerate(levels):
        seed = plan.seed + 1 + _SEEDS_A_RUN * number
        if isinstance(level, Rate):
            count = plan.num_requests
            if count is None and plan.duration_s is None and dataset is not None:
                count = len(dataset.conversations)
            rate = Rate(start=level.start, end=level.end, duration_s=plan.duration_s)
            arrivals = draw_arrivals(
                rate, count=count, process=plan.process, burstiness=plan.burstiness, seed=plan.seed
            )
            load = Load(
                name=f"{len(arrivals)} at once" if math.isinf(rate.start) else f"{rate} req/s",
                level=float(len(arrivals)) if math.isinf(rate.start) else (rate.start + rate.end) / 2,
                arrivals=arrivals,
                requests=_requests(plan, dataset, length, seed),
                max_concurrency=plan.max_concurrency,
                warmup=_warmup(plan, length, seed + 1),
                full_length=plan.is_made_up,
            )
        else:
            requests: Iterable[Conversation] = _requests(plan, dataset, length, seed)
            if plan.num_requests is not None or plan.duration_s is None:
                assert plan.num_requests is not None or dataset is not None
                requests = islice(requests, plan.num_requests or len(dataset.conversations))  # type: ignore[union-attr]
            load = Load(
                name=f"{level} user{'s' if level > 1 else ''}",
                level=level,
                arrivals=ClosedLoop(concurrency=level, duration_s=plan.duration_s, think_s=plan.workload.think_s),
                requests=requests,
                warmup=_warmup(plan, length, seed + 1),
                full_length=plan.is_made_up,
            )
        loads.append(load)
    return loads


def describe(plan: BenchPlan) -> str:
    """The workload in words."""
    work = plan.workload
    if plan.trace is not None:
        return f"trace {plan.trace}, {plan.speed:g} times as fast" if plan.speed != 1 else f"trace {plan.trace}"
    if plan.jsonl is not None:
        return f"requests of {plan.jsonl}"
    if plan.sharegpt is not None:
        return f"conversations of {plan.sharegpt}"
    if work.prefix_tokens:
        return (
            f"{work.num_prefixes} shared prefixes of {work.prefix_tokens} tokens, {work.input_tokens} after them, "
            f"{work.output_tokens} out"
        )
    if work.turns > 1:
        return (
            f"conversations of {work.turns} turns, {work.input_tokens} tokens in, {work.turn_tokens} more a turn, "
            f"{work.output_tokens} out"
        )
    return f"random texts, {work.input_tokens} tokens in, {work.output_tokens} out"


def _dataset(plan: BenchPlan, length: TokenLength) -> Dataset | None:
    output = plan.workload.output_tokens
    if plan.sharegpt is not None:
        return read_sharegpt(
            plan.sharegpt,
            max_turns=plan.max_turns,
            think_s=plan.workload.think_s,
            default_output_tokens=plan.output_tokens,
        )
    path = plan.trace or plan.jsonl
    if path is None:
        return None
    dataset = read_jsonl(
        path,
        api=plan.workload.api,
        length=length,
        default_output_tokens=output.high,
        time_unit=plan.time_unit,
        speed=plan.speed,
    )
    if plan.trace is not None and dataset.arrivals is None:
        raise BenchError(f"{path} has no timestamps, so it is no trace; send it with --jsonl")
    return dataset


def _trace(plan: BenchPlan, dataset: Dataset, length: TokenLength) -> Load:
    assert dataset.arrivals is not None
    arrivals = [arrival for arrival in dataset.arrivals if plan.duration_s is None or arrival < plan.duration_s][
        : plan.num_requests
    ]
    span = arrivals[-1] - arrivals[0]
    return Load(
        name="the trace",
        level=(len(arrivals) - 1) / span if span else 0.0,
        arrivals=arrivals,
        requests=dataset.conversations,
        max_concurrency=plan.max_concurrency,
        warmup=_warmup(plan, length, plan.seed + 1),
        full_length=plan.is_made_up,
    )


def _requests(plan: BenchPlan, dataset: Dataset | None, length: TokenLength, seed: int) -> Iterator[Conversation]:
    """Without end."""
    if dataset is not None:
        return cycle(dataset.conversations)
    return random_conversations(plan.workload, length, seed=seed, prefix_seed=plan.seed)


def _warmup(plan: BenchPlan, length: TokenLength, seed: int) -> tuple[Conversation, ...]:
    """Made up, whatever is measured: a file's own requests would find themselves in the cache."""
    return tuple(islice(random_conversations(plan.workload, length, seed=seed, prefix_seed=plan.seed), plan.num_warmup))
