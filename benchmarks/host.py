"""What the host costs: the engine's loop alone, then the HTTP server with 256 streams, both around a device that waits.

Part 1 runs the engine with 256 sequences on a device of 10 ms a step, batches written as for a real one. Part 2 puts
the HTTP server before it, on the same cores as 256 streaming clients in another process, and asks py-spy (if it is
installed) where the server's time goes. About a minute; `--write` puts the numbers into host.md.

usage: python benchmarks/host.py [--write] [--py-spy PATH]
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import CacheSection, ExecutionSection, ModelSection, SchedulerSection
from jaxserve.device.batch import BatchWriter, PackedLayout
from jaxserve.device.buckets import choose_shape, step_shapes
from jaxserve.device.runner import Runner, StepHandle
from jaxserve.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import Plan
from jaxserve.simulation.null_runner import NullRunner
from jaxserve.startup.loading import resolve_for
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from server.app import create_app
from server.config import ServeConfig, ServerSection
from server.engine.async_engine import AsyncEngine
from server.serve import listen, run_server

SEQUENCES = 256
STEP_S = 0.010
MAX_MODEL_LEN = 2048
ENGINE_STEPS = 1000
WARM_S, MEASURE_S, SPY_S = 5.0, 15.0, 10
LARGEST = 5
OURS = re.compile(r"\((jaxserve|server)/")
CONFIG = ServeConfig(
    model=ModelSection(max_model_len=MAX_MODEL_LEN),
    cache=CacheSection(page_size=16, num_pages=1 + SEQUENCES * 40),
    scheduler=SchedulerSection(max_num_seqs=SEQUENCES),
    execution=ExecutionSection(compilation_cache=None),
    server=ServerSection(port=0),
)
MARK = "<!-- filled in by host.py -->"


class WritingRunner:
    """Writes each batch as the device's runner does, and leaves the rest to the null device."""

    def __init__(self, config: ServeConfig, device: Runner) -> None:
        self._device = device
        self._block_q = config.execution.block_q
        self._shapes = step_shapes(config.execution.decode_buckets, config.execution.prefill_buckets)
        sizes: dict[str, Any] = {
            "max_num_seqs": SEQUENCES,
            "pages_per_seq": -(-MAX_MODEL_LEN // config.cache.page_size),
            "block_q": self._block_q,
        }
        self._layouts = {shape: PackedLayout(shape, **sizes) for shape in self._shapes}
        self._writer = BatchWriter(**sizes)

    def dispatch(self, plan: Plan) -> StepHandle:
        blocks = sum(chunk.num_blocks(self._block_q) for chunk in plan.chunks)
        self._writer.write(plan, self._layouts[choose_shape(self._shapes, len(plan.decodes), blocks)])
        return self._device.dispatch(plan)


def null_engine(step_s: float) -> Engine:
    """The engine of the embedded model's shape, on a device that answers with random tokens after so long."""
    path = resolve_model(CONFIG.model.path)
    model = open_checkpoint(path).config
    tokenizer = load_tokenizer(path)
    config = resolve_for(CONFIG, model)
    token_ids = itertools.cycle(np.random.default_rng(0).integers(100, 40000, 100_000).tolist())
    device = NullRunner(
        choose=lambda request, position: next(token_ids),
        block_q=config.execution.block_q,
        step_seconds=lambda plan: step_s,
    )
    return Engine(
        config,
        model,
        WritingRunner(config, device),
        num_token_ids=tokenizer.vocab_size,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
    )


def measure_engine(step_s: float) -> dict[str, float]:
    """Seconds a step, and the engine thread's CPU seconds in it, with 256 sequences running all the time."""
    engine = null_engine(step_s)
    rng = np.random.default_rng(0)
    names = map(str, itertools.count())

    def fill() -> None:
        stats = engine.stats()
        for _ in range(SEQUENCES - stats.num_running - stats.num_waiting):
            prompt = rng.integers(100, 40000, rng.integers(64, 257)).tolist()
            params = SamplingParams(temperature=0.7, max_tokens=int(rng.integers(64, 512)), ignore_eos=True)
            engine.add(next(names), prompt, params)

    fill()
    while engine.stats().num_waiting:  # the first prompts all come at once
        engine.step()
    before = engine.stats()
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(ENGINE_STEPS):
        fill()
        engine.step()
    seconds, cpu_seconds = time.perf_counter() - start, time.thread_time() - cpu
    after = engine.stats()
    steps = after.steps_total - before.steps_total
    return {
        "step_s": seconds / steps,
        "cpu_s": cpu_seconds / steps,
        "tokens": (after.output_tokens_total - before.output_tokens_total) / steps,
    }


def serve_null() -> None:
    """The server process of part 2."""
    tokenizer = load_tokenizer(resolve_model(CONFIG.model.path))

    def load(_: object) -> Engine:
        engine = null_engine(STEP_S)
        gc.collect()  # as `load_engine` does: what exists now lives as long as the server
        gc.freeze()
        return engine

    engine = AsyncEngine(load)
    run_server(create_app(engine, tokenizer, CONFIG.server), engine, listen(CONFIG.server), CONFIG.server)


class Stream(asyncio.Protocol):
    """One client: a request, its stream, the next request on the same connection. Parses as little as it can."""

    def __init__(self, number: int, totals: Counter[str]) -> None:
        self._totals = totals
        self._tokens = 64 + number // 2  # they do not all end at once
        body = json.dumps(
            {
                "model": "smollm2-135m",
                "prompt": f"{number}: " + "The quick brown fox jumps over the lazy dog. " * 10,
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._totals["bytes"] += len(data)
        self._totals["events"] += data.count(b"data: {")
        data = self._tail + data
        if b"[DONE]" in data:
            self._totals["requests"] += 1
            self._totals["tokens"] += self._tokens
            self._transport.write(self._request)
            data = b""
        self._tail = data[-8:]

    def connection_lost(self, error: Exception | None) -> None:
        self._totals["lost"] += 1


async def stream_all(host: str, port: int, pid: int, py_spy: str | None) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    totals: Counter[str] = Counter()
    transports = [
        (await loop.create_connection(lambda n=number: Stream(n, totals), host, port))[0] for number in range(SEQUENCES)
    ]
    await asyncio.sleep(WARM_S)
    before, start, cpu, own_cpu = Counter(totals), time.perf_counter(), cpu_seconds(pid), time.process_time()
    await asyncio.sleep(MEASURE_S)
    seconds = time.perf_counter() - start
    delta = totals - before
    result: dict[str, Any] = {name: delta[name] / seconds for name in ("events", "tokens", "requests", "bytes")}
    result |= {
        "server_cpu": (cpu_seconds(pid) - cpu) / seconds,
        "client_cpu": (time.process_time() - own_cpu) / seconds,
    }
    assert not totals["lost"], "the server closed connections"
    if py_spy is not None:
        result["stacks"] = await spy(py_spy, pid)
    for transport in transports:
        transport.abort()
    return result


async def spy(py_spy: str, pid: int) -> Counter[tuple[str, ...]]:
    """Stacks, the thread first and the innermost frame last, and their samples; threads that wait are left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacks"
        command = [py_spy, "record", "-p", str(pid), "-d", str(SPY_S), "-f", "raw", "-o", str(path), "-r", "200", "-t"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, error = await process.communicate()
        if process.returncode:
            raise SystemExit(error.decode())
        stacks: Counter[tuple[str, ...]] = Counter()
        for line in path.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            if "wait_until" not in stack:  # the device at work, not the host
                stacks[tuple(stack.split(";"))] += int(count)
    return stacks


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_server(py_spy: str | None) -> dict[str, Any]:
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("listening on http://").strip()
        host, _, port = address.rpartition(":")
        assert process.stderr.readline().startswith("ready"), "the server did not become ready"
        return asyncio.run(stream_all(host, int(port), process.pid, py_spy))
    finally:
        process.kill()
        process.wait()


def engine_table() -> list[str]:
    paced, free = measure_engine(STEP_S), measure_engine(0.0)
    added = paced["step_s"] / STEP_S - 1
    return [
        "| device | ms a step | engine thread's CPU, ms a step | tokens a step |",
        "| --- | --- | --- | --- |",
        f"| {STEP_S * 1e3:.0f} ms a step | {paced['step_s'] * 1e3:.2f} (**{added:+.1%}**) | "
        f"{paced['cpu_s'] * 1e3:.2f} | {paced['tokens']:.0f} |",
        f"| at once | {free['step_s'] * 1e3:.2f} | {free['cpu_s'] * 1e3:.2f} | {free['tokens']:.0f} |",
    ]


def server_table(result: dict[str, Any]) -> list[str]:
    ideal = SEQUENCES / STEP_S
    lines = [
        "| output tokens/s | of the device's | events/s | requests/s | server CPU | the same, a token | clients' CPU |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| **{result['tokens']:,.0f}** | {result['tokens'] / ideal:.0%} | {result['events']:,.0f} | "
        f"{result['requests']:.1f} | {result['server_cpu']:.2f} cores | "
        f"{result['server_cpu'] / result['tokens'] * 1e6:.0f} µs | {result['client_cpu']:.2f} cores |",
    ]
    if "stacks" in result:
        lines += ["", *flame_lines(result["stacks"])]
    return lines


def flame_lines(stacks: Counter[tuple[str, ...]]) -> list[str]:
    """The largest entries of the flame graph: our functions with the libraries' work for them, and any by itself."""
    samples = stacks.total()
    ours: Counter[str] = Counter()
    own: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for (thread, *frames), count in stacks.items():
        threads["engine" if "engine" in thread else "event loop" if "MainThread" in thread else "other"] += count
        own[name_of(frames[-1])] += count
        innermost = next((frame for frame in reversed(frames) if OURS.search(frame)), None)
        ours["none: asyncio and uvicorn" if innermost is None else name_of(innermost)] += count
    lines = [f"Samples by thread: {', '.join(f'{name} {n / samples:.0%}' for name, n in threads.most_common())}.", ""]
    lines += ["| ours, with what it calls of libraries | share | by itself | share |", "| --- | --- | --- | --- |"]
    for (name, n), (own_name, own_n) in zip(ours.most_common(LARGEST), own.most_common(LARGEST), strict=False):
        lines.append(f"| `{name}` | {n / samples:.0%} | `{own_name}` | {own_n / samples:.0%} |")
    return lines


def name_of(frame: str) -> str:
    """`step (jaxserve/engine.py:150)` without the line."""
    name, _, place = frame.partition(" (")
    return f"{name} ({'/'.join(place.rstrip(')').rpartition(':')[0].split('/')[-2:])})" if place else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the numbers into host.md")
    parser.add_argument("--py-spy", default=shutil.which("py-spy"), metavar="PATH")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_null()
    place = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [f"{datetime.now(UTC):%Y-%m-%d}, {place}, jax {jax.__version__}.", ""]
    lines += ["### The engine's loop alone", "", *engine_table(), ""]
    lines += [f"### The server with {SEQUENCES} streaming clients", "", *server_table(measure_server(options.py_spy))]
    print("\n".join(lines))
    if options.write:
        page = Path(__file__).with_name("host.md")
        head, mark, _ = page.read_text().partition(MARK)
        page.write_text(head + mark + "\n\n" + "\n".join(lines) + "\n")
    return None


if __name__ == "__main__":
    main()
