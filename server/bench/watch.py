"""Watches what a run's requests do not show: the client's own lateness, and the server's metrics while it runs."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from server.bench.http import ClosedError, ConnectError, HttpClient, ProtocolError

LAG_INTERVAL_S = 0.02
CPU_INTERVAL_S = 0.5
SCRAPE_INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 10.0
# By any of these prefixes; vLLM's names where it has the metric.
_PREFIXES = ("jaxserve:", "vllm:")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSample:
    """The server's metrics at one moment, without prefix, summed over labels."""

    time_s: float
    values: Mapping[str, float]


@dataclass(slots=True)
class Watch:
    """What was seen during a run. `lags_s` are those of the client's event loop, `cpu_shares` of one core."""

    start_time: float = 0.0
    lags_s: list[float] = field(default_factory=list)
    cpu_shares: list[float] = field(default_factory=list)
    samples: list[ServerSample] = field(default_factory=list)


@asynccontextmanager
async def watching(http: HttpClient) -> AsyncIterator[Watch]:
    """Watches until the block ends; the server's metrics are read before and after, too."""
    loop = asyncio.get_running_loop()
    watch = Watch(start_time=loop.time())
    await _scrape(http, watch)
    watch.start_time = loop.time()
    has_metrics = bool(watch.samples)
    tasks = [asyncio.create_task(_watch_lag(watch)), asyncio.create_task(_watch_cpu(watch))]
    if has_metrics:
        tasks.append(asyncio.create_task(_watch_server(http, watch)))
    try:
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if has_metrics:
        await _scrape(http, watch)


async def _watch_lag(watch: Watch) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        watch.lags_s.append(max(0.0, loop.time() - due))


async def _watch_cpu(watch: Watch) -> None:
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(CPU_INTERVAL_S)
        watch.cpu_shares.append((time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9))


async def _watch_server(http: HttpClient, watch: Watch) -> None:
    while True:
        await asyncio.sleep(SCRAPE_INTERVAL_S)
        await _scrape(http, watch)


async def _scrape(http: HttpClient, watch: Watch) -> None:
    """Adds a sample where the server has metrics that we know, else nothing."""
    try:
        status, body = await http.fetch("GET", "/metrics", timeout_s=SCRAPE_TIMEOUT_S)
    except (ConnectError, ClosedError, ProtocolError, TimeoutError):
        return
    values = parse_metrics(body.decode(errors="replace")) if status == 200 else {}
    if values:
        now = asyncio.get_running_loop().time()
        watch.samples.append(ServerSample(time_s=now - watch.start_time, values=values))


def parse_metrics(text: str) -> dict[str, float]:
    """Samples in Prometheus's text form, of names with one of our prefixes; summed over labels, without buckets."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(_PREFIXES):
            continue
        name, _, rest = line.partition("{")
        if rest:
            rest = rest.rpartition("}")[2]
        else:
            name, _, rest = line.partition(" ")
        name = name.partition(":")[2]
        if name.endswith("_bucket"):
            continue
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        values[name] = values.get(name, 0.0) + value
    return values
