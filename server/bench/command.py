"""`jaxserve bench`: probes the servers, runs every load against each in turn, prints and writes what came of it."""

import argparse
import asyncio
import json
import resource
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from server.bench.display import showing
from server.bench.errors import BenchError
from server.bench.flags import BenchPlan, Server, read_plan
from server.bench.html import to_html
from server.bench.http import HttpClient
from server.bench.load import Target
from server.bench.loads import describe, make_loads
from server.bench.measure import Load, Run, measure
from server.bench.probe import probe
from server.bench.result import Result
from server.bench.table import print_reports

EXIT_FAILED = 1
FORMAT_VERSION = 1


def run_bench(parsed: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 1 if more of a run failed than may. Raises BenchError."""
    plan = read_plan(parsed)
    for path in (plan.json, plan.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    _allow_many_connections()
    runs: list[Run] = []
    title = describe(plan)
    try:
        asyncio.run(_run(plan, Console(stderr=True), runs))
    except KeyboardInterrupt:
        if runs:  # what is measured is measured
            print_reports(Console(), [run.report for run in runs], title=title, verbose=plan.verbose)
        raise
    print_reports(Console(), [run.report for run in runs], title=title, verbose=plan.verbose)
    if plan.json is not None:
        plan.json.write_text(json.dumps(to_json(runs, title)))
        print(f"wrote {plan.json}")
    if plan.html is not None:
        plan.html.write_text(to_html(runs, title))
        print(f"wrote {plan.html}")
    return EXIT_FAILED if any(run.report.failure_share > plan.max_failure_share for run in runs) else 0


async def _run(plan: BenchPlan, console: Console, runs: list[Run]) -> None:
    """Appends each run as it ends."""
    prepared = [await _prepare(plan, server, console) for server in plan.servers]
    try:
        for level in range(len(prepared[0][1])):
            # The servers take turns at each load, so that whatever else changes with time changes for both.
            for server, (target, loads) in zip(plan.servers, prepared, strict=True):
                load = loads[level]
                async with showing(console, f"{server.name}, {load.name}", load) as progress:
                    runs.append(
                        await measure(target, load, server=server.name, promises=plan.promises, progress=progress)
                    )
    finally:
        for target, _ in prepared:
            await target.http.close()


async def _prepare(plan: BenchPlan, server: Server, console: Console) -> tuple[Target, list[Load]]:
    headers = {} if plan.api_key is None else {"authorization": f"Bearer {plan.api_key}"}
    http = HttpClient(server.url, headers=headers)
    probed = await probe(http, model=plan.model, api=plan.workload.api, full_length=plan.is_made_up, fields=plan.fields)
    for note in probed.notes:
        console.print(f"[yellow]![/yellow] {escape(f'{server.name}: {note}')}", highlight=False, soft_wrap=True)
    target = Target(
        http=http,
        model=probed.model,
        extras=probed.extras,
        fields=plan.fields,
        timeout_s=plan.timeout_s,
        stall_s=plan.stall_s,
    )
    return target, make_loads(plan, probed.length)


def to_json(runs: Sequence[Run], title: str) -> dict[str, Any]:
    """All of it, for other programs; times in seconds since each run's start."""
    return {
        "version": FORMAT_VERSION,
        "workload": title,
        "runs": [
            {
                **run.report.to_json(),
                "requests_detail": [_result_json(result) for result in run.results],
                "server_samples": [asdict(sample) for sample in run.watch.samples],
            }
            for run in runs
        ],
    }


def _result_json(result: Result) -> dict[str, Any]:
    """Without the reply's text: it may be private, and is long."""
    fields = asdict(result)
    del fields["text"]
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}


def _allow_many_connections() -> None:
    """An open loop needs a file descriptor for each request that is open; the default of many systems is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
