"""What each scheduling mechanism is worth, on the embedded model: every part compares two or more ways in one run.

usage: python benchmarks/scheduling.py [PART ...] [--scale S] [--write]

Parts: batching, rag, chats, host, chunked, pages, admission, fairness; without any, all of them: about 12 minutes on
two quiet cores (`host` 2 to 3 of them), and 1 more where no program is compiled yet. `--scale 0.2` makes a trial run of
smaller workloads, whose numbers mean nothing. `--write` puts the tables into scheduling.md.
"""

import argparse
import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from driver import Item, Run, drive
from workloads import w1

from jaxserve.engine import Engine
from jaxserve.llm import LLM

PAGE = Path(__file__).with_name("scheduling.md")
SLOTS = 32
HOST_PAGES = 600
VOCAB = (100, 49_000)


@cache
def loaded() -> LLM:
    """The model with every program that any part needs."""
    return LLM(
        "smollm2-135m",
        model={"max_model_len": 2304},
        cache={"num_pages": 2050, "host_pages": HOST_PAGES},
        scheduler={"max_num_seqs": SLOTS, "max_num_batched_tokens": SLOTS + 2048},
        execution={"decode_buckets": [1, 8, 16, SLOTS], "prefill_buckets": [2, 4, 8, 16, 64]},
    )


def engine(*, cache_settings: dict[str, Any] | None = None, **scheduler: Any) -> Engine:
    """An engine with other settings on the same device: programs and weights are shared, the cache begins empty."""
    first = loaded().engine
    config = first.config
    scheduler = {"max_num_batched_tokens": SLOTS + 512} | scheduler
    return Engine(
        config.model_copy(
            update={
                "scheduler": config.scheduler.model_copy(update=scheduler),
                "cache": config.cache.model_copy(update={"host_pages": 0} | (cache_settings or {})),
            }
        ),
        first.model_config,
        first.runner,
        num_token_ids=loaded().tokenizer.vocab_size,
        eos_token_ids=frozenset(),
    )


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = rng.integers(*VOCAB, count).tolist()
    return tokens


# --- the parts: each returns its section's lines ---


def batching(scale: float) -> list[str]:
    """Poisson bursts of four requests of mixed lengths, at three rates; throughput where the 95th percentiles meet."""
    rates = (0.6, 1.2, 2.4)  # requests a second
    window_s = 20 * scale

    def items(rate: float) -> list[Item]:
        rng = np.random.default_rng(4)
        bursts = np.cumsum(rng.exponential(4 / rate, max(1, round(rate * window_s / 4))))
        return [
            Item(
                arrival_s=float(burst),
                prompt=random_tokens(rng, int(rng.integers(32, 129))),
                max_tokens=int(np.clip(np.exp(rng.normal(3.4, 0.9)), 8, 160)),
            )
            for burst in bursts
            for _ in range(4)
        ]

    ways: dict[str, dict[str, Any]] = {
        "continuous": {"policy": "fcfs"},
        "static": {"policy": "static"},
        "dynamic, 200 ms": {"policy": "dynamic", "max_queue_delay_ms": 200.0},
    }
    lines = ["| way | offered req/s | output tok/s | TTFT p95 s | latency p50 s | latency p95 s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    curves: dict[str, list[tuple[float, float]]] = {}
    for way, settings in ways.items():
        for rate in rates:
            run = drive(engine(**settings), items(rate))
            latencies = [item.latency_s for item in run.items]
            p50, p95 = np.percentile(latencies, (50, 95))
            ttft = np.percentile([item.ttft_s for item in run.items], 95)
            curves.setdefault(way, []).append((float(p95), run.tokens_per_s))
            lines.append(f"| {way} | {rate} | {run.tokens_per_s:.1f} | {ttft:.2f} | {p50:.2f} | {p95:.2f} |")
    target = max(curve[1][0] for curve in curves.values())  # what every way keeps at the middle rate
    at_target = {way: _at_latency(curve, target) for way, curve in curves.items()}
    base = at_target["continuous"]
    ratios = {way: base / value for way, value in at_target.items() if way != "continuous"}
    lines += [
        "",
        f"At a 95th percentile of {target:.1f} s (interpolated): "
        + ", ".join(f"{way} {value:.1f} tok/s" for way, value in at_target.items())
        + "; continuous is "
        + " and ".join(f"{ratio:.2f}× {way}" for way, ratio in ratios.items())
        + ".",
    ]
    return [
        *lines,
        "",
        verdict(
            "Orca (Yu et al. 2022): scheduling each iteration anew serves more at equal latency than "
            "batches of whole requests",
            min(ratios.values()) > 1.0,
        ),
    ]


def _at_latency(curve: Sequence[tuple[float, float]], target: float) -> float:
    """Throughput where the curve passes the latency, on straight lines; its last point where it never does."""
    best = curve[0][1]
    for (low, slow), (high, fast) in itertools.pairwise(curve):
        if high <= target:
            best = max(best, fast)
        elif low <= target:
            return max(best, slow + (fast - slow) * (target - low) / (high - low))
    return best


def rag(scale: float) -> list[str]:
    """Two documents of 1,500 tokens, twelve short questions to each, all at once."""

    def items() -> list[Item]:
        rng = np.random.default_rng(5)
        documents = [random_tokens(rng, max(64, int(1500 * scale))) for _ in range(2)]
        return [
            Item(arrival_s=0.0, prompt=documents[number % 2] + random_tokens(rng, 20), max_tokens=8)
            for number in range(24)
        ]

    return _cache_on_and_off(items, "RAG", at_least=4.0)


def chats(scale: float) -> list[str]:
    """Six conversations of four turns with one system prompt; each turn follows the answer before it."""
    turns = max(2, int(4 * scale))

    def items() -> list[Item]:
        rng = np.random.default_rng(6)
        system = random_tokens(rng, 200)
        messages = [[random_tokens(rng, 60) for _ in range(turns)] for _ in range(6)]

        def turn(chat: int, number: int, before: list[int], now: float) -> Item:
            prompt = before + messages[chat][number]
            follows = number + 1 < turns
            return Item(
                arrival_s=now,
                prompt=prompt,
                max_tokens=40,
                then=(lambda output, end: turn(chat, number + 1, prompt + output, end)) if follows else None,
            )

        return [turn(chat, 0, system, 0.0) for chat in range(6)]

    return _cache_on_and_off(items, "chats", at_least=1.0)


def host(scale: float) -> list[str]:
    """Eight conversations of five turns, four at a time: 336 pages in the end, of which the device holds 180."""
    chats, turns = 8, 5

    def items() -> list[Item]:
        rng = np.random.default_rng(10)
        lengths = [max(32, int(320 * scale)), *[max(8, int(48 * scale))] * (turns - 1)]
        messages = [[random_tokens(rng, length) for length in lengths] for _ in range(chats)]

        def turn(chat: int, number: int, before: list[int], now: float) -> Item:
            prompt = before + messages[chat][number]
            follows = number + 1 < turns
            return Item(
                arrival_s=now,
                prompt=prompt,
                max_tokens=32,
                then=(lambda output, end: turn(chat, number + 1, prompt + output, end)) if follows else None,
            )

        return [turn(chat, 0, [], 0.0) for chat in range(chats)]

    lines = [
        "| host pages | seconds | output tok/s | mean TTFT s | of later turns | prompt found | saved | restored |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    runs = {}
    for pages in (0, HOST_PAGES):
        settings = {"num_pages": 1 + max(24, int(180 * scale)), "host_pages": pages}
        serving = engine(cache_settings=settings, max_num_seqs=4)
        runs[pages] = run = drive(serving, items())
        found = sum(item.cached_tokens for item in run.items) / sum(len(item.prompt) for item in run.items)
        stats = serving.stats()
        lines.append(
            f"| {pages} | {run.seconds:.1f} | {run.tokens_per_s:.1f} | {run.mean_ttft_s():.2f} | {_later(run):.2f} | "
            f"{found:.0%} | {stats.host_pages_saved_total} | {stats.host_pages_restored_total} |"
        )
    throughput = runs[0].seconds / runs[HOST_PAGES].seconds
    ttft = _later(runs[0]) / _later(runs[HOST_PAGES])
    return [
        *lines,
        "",
        f"{throughput:.2f}× the throughput, TTFT of later turns shorter by {ttft:.2f}×.",
        "",
        verdict(
            "SGLang's HiCache: where conversations outgrow the device, copies of their pages in host memory beat "
            "computing them again",
            throughput > 1.0,
        ),
    ]


def _later(run: Run) -> float:
    """The mean TTFT of turns after the first."""
    longest_first = max(len(item.prompt) for item in run.items if item.arrival_s == 0.0)
    return float(np.mean([item.ttft_s for item in run.items if len(item.prompt) > longest_first]))


def _cache_on_and_off(items: Callable[[], list[Item]], name: str, *, at_least: float) -> list[str]:
    lines = [
        "| prefix cache | seconds | requests/s | mean TTFT s | prompt tokens found |",
        "| --- | --- | --- | --- | --- |",
    ]
    runs = {}
    for way in ("off", "on"):
        runs[way] = run = drive(engine(cache_settings={"prefix_caching": way == "on"}), items())
        found = sum(item.cached_tokens for item in run.items) / sum(len(item.prompt) for item in run.items)
        lines.append(
            f"| {way} | {run.seconds:.1f} | {len(run.items) / run.seconds:.2f} | {run.mean_ttft_s():.2f} | "
            f"{found:.0%} |"
        )
    throughput = runs["off"].seconds / runs["on"].seconds
    ttft = runs["off"].mean_ttft_s() / runs["on"].mean_ttft_s()
    return [
        *lines,
        "",
        f"{throughput:.2f}× the throughput, TTFT shorter by {ttft:.2f}×.",
        "",
        verdict(
            f"RadixAttention (Zheng et al. 2024): sharing prefixes multiplies throughput on {name}; here at least "
            f"{at_least:g}×",
            throughput >= at_least,
        ),
    ]


def chunked(scale: float) -> list[str]:
    """Four streams decode while three prompts of 2,000 tokens come in."""

    def items() -> list[Item]:
        rng = np.random.default_rng(7)
        streams = [Item(arrival_s=0.0, prompt=random_tokens(rng, 32), max_tokens=int(160 * scale)) for _ in range(4)]
        longs = [Item(arrival_s=1.0 + i, prompt=random_tokens(rng, int(2000 * scale)), max_tokens=4) for i in range(3)]
        return [*streams, *longs]

    lines = [
        "| prompts | worst gap of a stream s | mean TTFT of the long prompts s | output tok/s |",
        "| --- | --- | --- | --- |",
    ]
    gaps = {}
    for way, budget in {"whole": SLOTS + 2048, "in chunks of 128": SLOTS + 128}.items():
        run = drive(engine(max_num_batched_tokens=budget), items())
        streams, longs = run.items[:4], run.items[4:]
        gaps[way] = max(item.worst_gap_s for item in streams)
        ttft = np.mean([item.ttft_s for item in longs])
        lines.append(f"| {way} | {gaps[way]:.2f} | {ttft:.2f} | {run.tokens_per_s:.1f} |")
    ratio = gaps["whole"] / gaps["in chunks of 128"]
    return [
        *lines,
        "",
        f"The worst gap is {ratio:.1f}× shorter.",
        "",
        verdict(
            "Sarathi-Serve (Agrawal et al. 2024): chunks of prompts beside decodes keep streams from stalling",
            ratio > 1.0,
        ),
    ]


def pages(scale: float) -> list[str]:
    """W1, 16-token pages: the share of active pages' slots that hold no token, weighted by time."""
    work = w1(num_requests=max(8, int(64 * scale)))
    run = drive(engine(), [Item(arrival_s=0.0, prompt=w.prompt_token_ids, max_tokens=w.output_tokens) for w in work])
    return [
        "| requests | page size | waste | output tok/s | running at most |",
        "| --- | --- | --- | --- | --- |",
        f"| {len(work)} | 16 | {run.waste:.2%} | {run.tokens_per_s:.1f} | {run.peak_running} |",
        "",
        verdict("PagedAttention (Kwon et al. 2023): pages waste under 4 % of the cache", run.waste < 0.04),
    ]


def admission(scale: float) -> list[str]:
    """Requests that may take 256 tokens and mostly stop earlier, on 120 pages: a quarter of what all could want."""

    def items() -> list[Item]:
        rng = np.random.default_rng(8)
        lengths = np.clip(np.exp(rng.normal(3.6, 0.8, int(24 * scale) or 4)), 8, 256).astype(int)
        return [
            Item(arrival_s=0.0, prompt=random_tokens(rng, 64), max_tokens=256, stop_at=int(length))
            for length in lengths
        ]

    lines = [
        "| admission | seconds | output tok/s | mean TTFT s | running at most | preemptions |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    seconds = {}
    for way in ("guaranteed", "optimistic"):
        run = drive(engine(admission=way, cache_settings={"num_pages": 121}), items())
        seconds[way] = run.seconds
        lines.append(
            f"| {way} | {run.seconds:.1f} | {run.tokens_per_s:.1f} | {run.mean_ttft_s():.2f} | {run.peak_running} | "
            f"{run.preemptions} |"
        )
    ratio = seconds["guaranteed"] / seconds["optimistic"]
    return [
        *lines,
        "",
        f"Optimistic takes {1 / ratio:.2f} of the time.",
        "",
        verdict(
            "PagedAttention (Kwon et al. 2023): taking pages as they are needed and preempting serves more than "
            "reserving the maximum",
            ratio > 1.0,
        ),
    ]


def fairness(scale: float) -> list[str]:
    """A greedy tenant queues 24 requests at once; a modest one asks every second and a half. Eight slots."""

    def items() -> list[Item]:
        rng = np.random.default_rng(9)
        greedy = [
            Item(arrival_s=0.0, prompt=random_tokens(rng, 64), max_tokens=48, tenant="greedy")
            for _ in range(int(24 * scale) or 12)
        ]
        modest = [
            Item(arrival_s=0.5 + 1.5 * i, prompt=random_tokens(rng, 64), max_tokens=16, tenant="modest")
            for i in range(int(6 * scale) or 2)
        ]
        return [*greedy, *modest]

    lines = [
        "| policy | modest mean TTFT s | modest worst TTFT s | greedy mean latency s | output tok/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    waits = {}
    for policy in ("fcfs", "fair"):
        run = drive(engine(policy=policy, max_num_seqs=8), items())
        modest = [item.ttft_s for item in run.items if item.tenant == "modest"]
        greedy = [item.latency_s for item in run.items if item.tenant == "greedy"]
        waits[policy] = float(np.mean(modest))
        lines.append(
            f"| {policy} | {waits[policy]:.2f} | {max(modest):.2f} | {np.mean(greedy):.2f} | {run.tokens_per_s:.1f} |"
        )
    ratio = waits["fcfs"] / waits["fair"]
    return [
        *lines,
        "",
        f"The modest tenant waits {ratio:.2f}× shorter.",
        "",
        verdict(
            "VTC (Sheng et al. 2024): a tenant that asks for little does not wait behind one that asks for much",
            ratio > 1.0,
        ),
    ]


def verdict(claim: str, held: bool) -> str:
    return f"Claim: {claim}. **{'It held.' if held else 'It did not hold.'}**"


PARTS: dict[str, Callable[[float], list[str]]] = {
    part.__name__: part for part in (batching, rag, chats, host, chunked, pages, admission, fairness)
}


def write(part: str, lines: Sequence[str]) -> None:
    """Puts a section's lines between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    block = f"<!-- {part} -->\n" + "\n".join(lines) + f"\n<!-- end of {part} -->"
    text, count = re.subn(rf"<!-- {part} -->.*?<!-- end of {part} -->", lambda _: block, text, flags=re.DOTALL)
    assert count == 1, f"{PAGE} has {count} sections for {part}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads; below 1 for a trial")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parsed = parser.parse_args()
    unknown = set(parsed.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    start = time.perf_counter()
    loaded()
    print(f"loaded in {time.perf_counter() - start:.0f} s")
    for part in parsed.parts or PARTS:
        start = time.perf_counter()
        lines = PARTS[part](parsed.scale)
        where = f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}"
        lines = [*lines, "", f"_{where}; {time.perf_counter() - start:.0f} s._"]
        print(f"\n## {part}\n\n" + "\n".join(lines), flush=True)
        if parsed.write:
            write(part, lines)


if __name__ == "__main__":
    main()
