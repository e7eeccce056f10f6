"""Runs a server on a tiny model for a while with clients of every kind, then counts what is left.

usage: python -m tests.soak [--minutes 20] [--clients 64]

A third of the clients leave early, send nonsense or never read. At the end nothing may run, every page must be free or
cached, memory, file descriptors and threads must not have grown since the first minutes, what the well-behaved clients
saw must be whole, and the server's counters must add up to the sequence. Exits with 1 and the reason if not.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.live_process import metrics_of, server_process, write_tiny_model

GRACE_S = 30.0  # after the last client: the time for everything to be given back
WARM_SHARE = 0.25  # of the run, before growth counts
RSS_GROWTH = 0.10
LATENCY_BOUND_S = 60.0  # of a well-behaved request: four sequences of at most 96 tokens
# 16 sequences of up to 192 tokens want 192 pages. With 24 they wait, and those that run long preempt one another.
SETTINGS = (
    *(
        "model.max_model_len=192",
        "cache.num_pages=25",
        "scheduler.max_num_seqs=16",
        "scheduler.max_queued_requests=256",
    ),
    *("execution.compilation_cache=null", "execution.strict_shapes=true"),
)
WORDS = (
    *("the", "a", "of", "river", "stone", "bright", "seven", "quiet", "lamp", "under", "over", "green"),
    *("🙂", "élan", "世界", "data:", "{{x}}", "<|im_end|>"),
)


@dataclass(kw_only=True, slots=True)
class Tally:
    """What the clients saw."""

    seconds: list[float] = field(default_factory=list)  # of well-behaved requests
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        self.faults.append(what)


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The server process, at one moment."""

    rss: int
    descriptors: int
    threads: int


def usage_of(pid: int) -> Usage:
    status = Path(f"/proc/{pid}/status").read_text()

    def value(name: str) -> int:
        match = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
        assert match, name
        return int(match[1])

    return Usage(rss=value("VmRSS") * 1024, descriptors=len(os.listdir(f"/proc/{pid}/fd")), threads=value("Threads"))


def text_of(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def chat_body(rng: random.Random, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text_of(rng, 12)}]
    if rng.random() < 0.3:  # shares its beginning with others
        messages.insert(0, {"role": "system", "content": "You are a quiet lamp under the river. " * 2})
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": rng.randint(1, 96)}
    if rng.random() < 0.5:
        body |= {"temperature": rng.uniform(0.1, 1.5), "seed": rng.randint(0, 99), "top_p": rng.uniform(0.3, 1)}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        body |= {"n": rng.randint(2, 4)}
    if rng.random() < 0.2:
        body |= {"stop": [rng.choice(WORDS), "e"]}
    return body | fields


async def whole(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    body = chat_body(rng)
    start = time.perf_counter()
    reply = await http.post("/v1/chat/completions", json=body)
    if reply.status_code == 200:
        tally.seconds.append(time.perf_counter() - start)
        answer = reply.json()
        if len(answer["choices"]) != body.get("n", 1) or not all(c["finish_reason"] for c in answer["choices"]):
            tally.fault(f"an answer lacks a choice or its finish reason: {reply.text[:200]}")
    elif reply.status_code not in (400, 503):
        tally.fault(f"a good chat was answered {reply.status_code}: {reply.text[:200]}")
    tally.outcomes[f"whole {reply.status_code}"] += 1


async def streamed(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    body = chat_body(rng, stream=True, stream_options={"include_usage": True})
    start = time.perf_counter()
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    tally.outcomes[f"streamed {reply.status_code}"] += 1
    if reply.status_code == 200:
        tally.seconds.append(time.perf_counter() - start)
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        finished = Counter(c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"])
        if lines[-1] != "data: [DONE]" or finished != Counter(range(body.get("n", 1))):
            tally.fault(f"a stream does not end as it must: {finished}, {lines[-2:]}")
    elif reply.status_code not in (400, 503):
        tally.fault(f"a good stream was answered {reply.status_code}")


async def completion(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    body = {"model": "tiny", "prompt": [text_of(rng, 20) for _ in range(rng.randint(1, 3))], "echo": rng.random() < 0.3}
    start = time.perf_counter()
    reply = await http.post("/v1/completions", json=body)
    tally.outcomes[f"completion {reply.status_code}"] += 1
    if reply.status_code == 200:
        tally.seconds.append(time.perf_counter() - start)
    elif reply.status_code not in (400, 503):
        tally.fault(f"a good completion was answered {reply.status_code}: {reply.text[:200]}")


async def other_routes(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"model": "tiny", "input": text_of(rng, 8), "max_output_tokens": 16}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"model": "tiny", "input": text_of(rng, 8)}),
        ("/tokenize", {"model": "tiny", "prompt": text_of(rng, 30)}),
    ]
    path, body = rng.choice(bodies)
    reply = await http.post(path, json=body)
    tally.outcomes[f"{path} {reply.status_code}"] += 1
    if reply.status_code >= 500 and reply.status_code != 503:
        tally.fault(f"{path} answered {reply.status_code}: {reply.text[:200]}")


async def leaver(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    body = chat_body(rng, stream=True, max_tokens=64)
    pieces = rng.randint(0, 6)
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for _ in reply.aiter_raw():
            pieces -= 1
            if pieces <= 0:
                break
    tally.outcomes["left a stream"] += 1


async def impatient(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    with suppress(httpx.TimeoutException):
        await http.post("/v1/chat/completions", json=chat_body(rng, max_tokens=64), timeout=rng.uniform(0.01, 0.3))
    tally.outcomes["left an answer"] += 1


async def vandal(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    bodies = [
        b"{",
        b"",
        b"[1,2",
        os.urandom(200),
        b'{"model":"tiny","messages":[]}',
        b"[" * 20_000,
        b'"' + b"x" * 50_000,
    ]
    good = json.dumps(chat_body(rng)).encode()
    cut = rng.randint(0, len(good))
    bodies += [good[:cut], good[:cut] + bytes([rng.randint(0, 255)]) + good[cut + 1 :]]
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/responses"])
    reply = await http.post(path, content=rng.choice(bodies), headers={"content-type": "application/json"})
    tally.outcomes[f"nonsense {reply.status_code // 100}xx"] += 1
    if reply.status_code >= 500 and reply.status_code != 503:
        tally.fault(f"nonsense was answered {reply.status_code}: {reply.text[:200]}")


async def mute(http: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    """Asks for a stream and never reads it; or never finishes asking."""
    base = http.base_url
    _, writer = await asyncio.open_connection(base.host, base.port)
    body = json.dumps(chat_body(rng, stream=True)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    writer.write(request if rng.random() < 0.5 else request[: rng.randint(1, len(request))])
    await asyncio.sleep(rng.uniform(0.1, 3.0))
    writer.transport.abort()
    tally.outcomes["never read"] += 1


Client = Callable[[httpx.AsyncClient, random.Random, Tally], Awaitable[None]]
GOOD: tuple[Client, ...] = (whole, streamed, streamed, completion, other_routes)
BAD: tuple[Client, ...] = (leaver, impatient, vandal, mute)


async def client(number: int, url: str, until: float, tally: Tally) -> None:
    rng = random.Random(number)
    kinds = BAD if number % 3 == 0 else GOOD
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < until:
            behave = rng.choice(kinds)
            try:
                await behave(http, rng, tally)
            except httpx.HTTPError as error:
                if kinds is GOOD:
                    tally.fault(f"{behave.__name__}: {error!r}")


async def watch(pid: int, until: float) -> list[tuple[float, Usage]]:
    samples = []
    while time.monotonic() < until:
        samples.append((time.monotonic(), usage_of(pid)))
        await asyncio.sleep(2)
    return samples


def check_counters(metrics: Mapping[str, float], tally: Tally) -> None:
    accepted, ended = metrics["requests_accepted_total"], metrics["request_success_total"]
    if not accepted or accepted != ended:
        tally.fault(f"{accepted:.0f} sequences were accepted, {ended:.0f} ended")
    for name, value in metrics.items():
        if value < 0:
            tally.fault(f"{name} is {value}")
    for name in ("num_requests_running", "num_requests_waiting"):
        if metrics[name]:
            tally.fault(f"{name} is {metrics[name]:.0f} after everybody left")


def check_growth(samples: list[tuple[float, Usage]], after: Usage, tally: Tally) -> None:
    """The peak of the last quarter against that of the quarter after the warm-up; idle descriptors against both."""
    warm = samples[int(len(samples) * WARM_SHARE) :]
    early = [usage for _, usage in warm[: len(warm) // 3]]
    late = [usage for _, usage in warm[-len(warm) // 3 :]]
    rss_before, rss_after = (statistics.median(usage.rss for usage in part) for part in (early, late))
    print(
        f"memory {rss_before / 2**20:.0f} -> {rss_after / 2**20:.0f} MiB (medians of the second and the last quarter)"
    )
    if rss_after > rss_before * (1 + RSS_GROWTH):
        tally.fault(f"memory grew from {rss_before / 2**20:.0f} to {rss_after / 2**20:.0f} MiB")
    first = samples[0][1]
    print(f"descriptors {first.descriptors} at first, {after.descriptors} at last; threads {after.threads}")
    if after.descriptors > first.descriptors + 8:
        tally.fault(f"{after.descriptors} file descriptors are open, {first.descriptors} were at first")
    most = max(usage.threads for usage in early)
    if after.threads > most:
        tally.fault(f"{after.threads} threads, at most {most} in the second quarter")


async def run_clients(url: str, pid: int, seconds: float, clients: int, tally: Tally) -> list[tuple[float, Usage]]:
    until = time.monotonic() + seconds
    watching = asyncio.create_task(watch(pid, until))
    await asyncio.gather(*(client(number, url, until, tally) for number in range(clients)))
    return await watching


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        model = write_tiny_model(Path(folder))
        with server_process(model, SETTINGS, Path(folder) / "server.log") as server:
            url, pid = server.address, server.process.pid
            print(f"{options.clients} clients for {options.minutes:g} minutes at {url}", flush=True)
            samples = asyncio.run(run_clients(url, pid, options.minutes * 60, options.clients, tally))
            deadline = time.monotonic() + GRACE_S
            while metrics_of(url)["num_requests_running"] and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(2)
            metrics = metrics_of(url)
            check_counters(metrics, tally)
            check_growth(samples, usage_of(pid), tally)
            for check in (server.check_alive, server.stop, server.check_log):
                try:
                    check()
                except AssertionError as error:
                    tally.fault(str(error))
    seconds = sorted(tally.seconds)
    worst = seconds[-1] if seconds else 0.0
    print(f"{sum(tally.outcomes.values())} requests: {dict(sorted(tally.outcomes.items()))}")
    if not seconds or worst > LATENCY_BOUND_S:
        tally.fault(f"a well-behaved request took {worst:.1f} s; the bound is {LATENCY_BOUND_S:.0f}")
    if seconds:
        middle, p99 = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.99)]
        print(f"{len(seconds)} well-behaved answers: median {middle:.2f} s, p99 {p99:.2f} s, worst {worst:.2f} s")
    preemptions = metrics["num_preemptions_total"]
    print(f"{preemptions:.0f} preemptions")
    if not preemptions:
        tally.fault("nobody was preempted: the pages are not tight enough to try it")
    for fault in tally.faults[:20]:
        print(f"FAULT: {fault}")
    print(f"{len(tally.faults)} faults")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
