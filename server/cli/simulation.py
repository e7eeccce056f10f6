"""The commands `profile` and `simulate`: their flags, and what they print; measuring and simulating are below."""

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.simulation.profiler import Profile, profile, write_trace
from jaxserve.simulation.simulator import Distribution, Report, simulate
from jaxserve.simulation.step_estimate import estimate_step_times
from jaxserve.simulation.step_times import StepTimes, config_digest
from jaxserve.simulation.traces import ARRIVAL_PROCESSES, TracedRequest, arrival_times, read_trace, synthetic_trace
from jaxserve.startup.loading import load_engine, resolve_for
from jaxserve.startup.resolve import user_cache_folder
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from models.config import ModelConfig
from server.bench.flags import count, positive
from server.cli.progress import LoadDisplay

TRACE_SECONDS = 2.0  # a trace of more is slow to open


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=positive, default=75.0, help="time to measure, after the start; default: 75")
    parser.add_argument("--output", type=Path, metavar="FILE", help="step times, JSON; default: in the user's cache")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="also write a JAX profiler trace of a few steps")


def run_profile(config: EngineConfig, parsed: argparse.Namespace) -> int:
    """Measures this device, prints and writes the table."""
    # Every shape is measured in its own program, so all of them have to be there.
    execution = config.execution.model_copy(update={"serve_while_compiling": False})
    config = config.model_copy(update={"execution": execution})
    console = Console(stderr=True)
    display = LoadDisplay(console)
    try:
        engine = load_engine(config, load_tokenizer(resolve_model(config.model.path)), progress=display.update)
        result = profile(engine, budget_s=parsed.seconds, report=display.update)
        if parsed.trace is not None:
            write_trace(engine, result.times, parsed.trace, seconds=TRACE_SECONDS)
    finally:
        display.close()
    path = parsed.output or default_path(engine.config)
    result.times.write(path)
    _print_profile(Console(), result)
    print(f"step times: {path}")
    if parsed.trace is not None:
        print(f"profiler trace: {parsed.trace}")
    return 0


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--times", type=Path, metavar="FILE", help="what `jaxserve profile` wrote; default: for --config"
    )
    parser.add_argument(
        "--hbm-gb-per-s", type=positive, help="instead of --times, estimate them for a memory this fast"
    )
    parser.add_argument("--peak-tflops", type=positive, help="and arithmetic this fast, both of the data sheet")
    parser.add_argument(
        "--bus-gb-per-s",
        type=positive,
        default=16.0,
        help="and the way between host and device so fast; default: 16, PCIe 3.0 x16",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests to replay, JSON lines")
    parser.add_argument("--arrivals", choices=ARRIVAL_PROCESSES, help="instead of a trace, random arrivals")
    parser.add_argument("--rate", type=positive, help="of --arrivals: requests per second")
    parser.add_argument("--cv", type=positive, default=1.0, help="of gamma arrivals: spread of the gaps; 1: as Poisson")
    parser.add_argument("--requests", type=count, default=1000, help="of --arrivals: how many; default: 1000")
    parser.add_argument(
        "--prompt-tokens", type=_range, default=(64, 256), metavar="LOW-HIGH", help="of --arrivals; default: 64-256"
    )
    parser.add_argument(
        "--output-tokens", type=_range, default=(8, 256), metavar="LOW-HIGH", help="of --arrivals; default: 8-256"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run_simulate(config: EngineConfig, parsed: argparse.Namespace) -> int:
    """Replays a trace against the step times and prints what its requests would see."""
    trace = _trace(parsed)
    model = open_checkpoint(resolve_model(config.model.path)).config
    config = resolve_for(config, model)
    times = _times(config, model, parsed)
    start = time.perf_counter()
    report = simulate(config, times, trace, seed=parsed.seed)
    if parsed.json:
        summary = asdict(report)
        del summary["served"]
        print(json.dumps(summary, indent=1))
        return 0
    _print_report(Console(), report, times)
    print(f"simulated {report.duration_s:.1f} s in {time.perf_counter() - start:.2f} s")
    return 0


def default_path(config: EngineConfig) -> Path:
    """Where the step times of a resolved configuration lie on this machine."""
    name = f"{config.model.name}-{jax.devices()[0].device_kind}-{config_digest(config)}"
    return user_cache_folder() / "step_times" / (re.sub(r"[^\w.-]+", "_", name) + ".json")


def _times(config: EngineConfig, model: ModelConfig, parsed: argparse.Namespace) -> StepTimes:
    if parsed.hbm_gb_per_s is not None or parsed.peak_tflops is not None:
        if parsed.hbm_gb_per_s is None or parsed.peak_tflops is None or parsed.times is not None:
            raise ConfigError("give either --times or both --hbm-gb-per-s and --peak-tflops")
        return estimate_step_times(
            config,
            model,
            bytes_per_s=parsed.hbm_gb_per_s * 1e9,
            flops_per_s=parsed.peak_tflops * 1e12,
            bus_bytes_per_s=parsed.bus_gb_per_s * 1e9,
        )
    return step_times(config, parsed.times)


def step_times(config: EngineConfig, given: Path | None) -> StepTimes:
    """What `jaxserve profile` measured: the file that is given, else of this configuration. Raises ConfigError."""
    path = given or default_path(config)
    if given is None and not path.exists():
        raise ConfigError("no step times of this configuration were measured here; run `jaxserve profile` (or --times)")
    times = StepTimes.read(path)
    if times.config_digest != config_digest(config):
        print(f"jaxserve: {path} was measured for another configuration; its shapes are interpolated", file=sys.stderr)
    return times


def _trace(parsed: argparse.Namespace) -> list[TracedRequest]:
    if (parsed.trace is None) == (parsed.arrivals is None):
        raise ConfigError("give either --trace or --arrivals")
    if parsed.trace is not None:
        return read_trace(parsed.trace)
    if parsed.rate is None:
        raise ConfigError("--arrivals needs --rate, in requests per second")
    arrivals = arrival_times(parsed.arrivals, parsed.rate, parsed.requests, seed=parsed.seed, cv=parsed.cv)
    return synthetic_trace(arrivals, parsed.prompt_tokens, parsed.output_tokens, seed=parsed.seed)


def _print_profile(console: Console, result: Profile) -> None:
    times, run = result.times, result.run
    table = Table(title=f"{times.model} on {times.device}, jax {times.jax_version}", title_justify="left")
    for column in ("decode rows", "prefill blocks", "keys", "ms a step", "tokens/s"):
        table.add_column(column, justify="right")
    for step in sorted(times.steps, key=lambda step: (step.prefill_blocks, step.decode_rows, step.kv_tokens)):
        tokens = step.decode_rows + step.prefill_blocks * times.block_q
        rate = f"{tokens / step.seconds:,.0f}"
        cells = (step.decode_rows, step.prefill_blocks, f"{step.kv_tokens:,}", f"{step.seconds * 1e3:.2f}", rate)
        table.add_row(*map(str, cells))
    console.print(table)
    if times.page_copy is not None:
        console.print(
            f"a page to host memory: {times.page_copy.save_seconds * 1e3:.3f} ms, and back: "
            f"{times.page_copy.restore_seconds * 1e3:.3f} ms",
            highlight=False,
        )
    console.print(
        f"a real run: {run.steps} steps in {run.seconds:.1f} s, {run.output_tokens / run.seconds:.0f} output tokens/s; "
        f"device idle for {run.idle_share:.1%} of it, {run.idle_seconds / run.steps * 1e3:.2f} ms a step; it took "
        f"{run.seconds / run.table_seconds:.2f} of what the table said, which is put down to the host "
        f"({times.host_seconds * 1e3:.2f} ms a step) or, below 1, to the table, which then follows the run",
        highlight=False,
        soft_wrap=True,
    )


def _print_report(console: Console, report: Report, times: StepTimes) -> None:
    table = Table(title=f"{times.model} on {times.device} ({times.source})", title_justify="left")
    for column in ("seconds", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    rows: dict[str, Distribution | None] = {
        "to the first token": report.ttft,
        "between tokens": report.token_gap,
        "to the last token": report.latency,
    }
    for name, of in rows.items():
        if of is not None:
            table.add_row(name, *(f"{value:.3f}" for value in (of.mean, of.p50, of.p90, of.p95, of.p99, of.max)))
    console.print(table)
    assert report.busy_share is not None
    refused = "".join(f", {count} refused ({reason})" for reason, count in report.refused.items())
    lines = (
        f"{report.requests} requests, {len(report.served)} served{refused}; at most {report.running_peak} at once, "
        f"{report.waiting_peak} waiting",
        f"{report.output_tokens_per_s:.1f} output tokens/s, {report.requests_per_s:.2f} requests/s; "
        f"{report.steps} steps, the device busy {report.busy_share:.1%}",
        f"pages: {report.pages_mean:.0f} in the mean, {report.pages_peak} at most, of {report.pages_total}; "
        f"{report.preemptions} preemptions; {report.cached_tokens} of {report.prompt_tokens} prompt tokens cached",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if report.pages_saved:
        cost = (
            "which costs nothing here: the step times have no page_copy" if times.page_copy is None else "as measured"
        )
        if times.source == "estimate":
            cost = "at the bus's peak"
        console.print(
            f"host memory: {report.pages_saved} pages saved, {report.pages_restored} restored, {cost}",
            highlight=False,
            soft_wrap=True,
        )


def _range(text: str) -> tuple[int, int]:
    """`100-200`, or `100` alone."""
    low, dash, high = text.partition("-")
    bounds = (int(low), int(high if dash else low))
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} is no range of positive numbers")
    return bounds
