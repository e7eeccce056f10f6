"""Prints reports to read: one line a run, all percentiles where one run stands alone; computes nothing."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from server.bench.report import Report
from server.bench.slo import format_pair, format_seconds
from server.bench.statistics import PERCENTILES, Distribution, Estimate

# Wider than any table here.
MAX_WIDTH = 400
# Below this a 99th percentile rests on one request.
MIN_REQUESTS_FOR_P99 = 100
MEASURES = (
    ("first token", "ttft"),
    ("  from the socket", "server_ttft"),
    ("token gap", "token_gap"),
    ("chunk gap", "chunk_gap"),
    ("per output token", "tpot"),
    ("end to end", "e2e"),
    ("client held back", "client_wait"),
)
# A wait below this is the timer's own.
NOTEWORTHY_WAIT_S = 1e-3


def print_reports(console: Console, reports: Sequence[Report], *, title: str, verbose: bool) -> None:
    """Everything that a terminal should tell of these runs.

    Args:
      reports: in the order of their loads; servers alternate where there are several.
      verbose: all percentiles of every run, not only of one that stands alone.
    """
    servers = {report.server: report.model for report in reports}
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False, soft_wrap=True)
    for name, model in servers.items():
        console.print(f"[dim]{escape(model)} at {escape(name)}[/dim]", highlight=False, soft_wrap=True)
    console.print()
    if len(reports) > 1:
        print_table(console, _overview(reports, num_servers=len(servers)))
        console.print()
    for report in reports:
        if verbose or len(reports) == 1:
            if len(reports) > 1:
                console.print(f"[bold]{escape(_name(report, len(servers)))}[/bold]", highlight=False)
            print_table(console, _detail(report))
            for line in facts(report):
                console.print(escape(line), highlight=False, soft_wrap=True)
            console.print()
    for report in reports:
        _print_notes(console, report, "" if len(reports) == 1 else f"{_name(report, len(servers))}: ")


def print_table(console: Console, table: Table) -> None:
    """As wide as it needs: a number cut in two is worse than a line that a narrow terminal breaks."""
    width = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).maximum
    before = console.width
    console.width = max(width, before)
    console.print(table, crop=False)
    console.width = before


def _name(report: Report, num_servers: int) -> str:
    return f"{report.load} · {report.server}" if num_servers > 1 else report.load


def _overview(reports: Sequence[Report], *, num_servers: int) -> Table:
    """One row a run. Servers of one load stand together, with the better number in bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("\nload")
    if num_servers > 1:
        table.add_column("\nserver")
    table.add_column("\nreq/s", justify="right")
    table.add_column("output\ntok/s", justify="right")
    for name in ("first token", "token gap", "end to end"):
        table.add_column(f"{name}\np50  p95", justify="right")
    has_goodput = any(report.good_share is not None for report in reports)
    if has_goodput:
        table.add_column("\ngood", justify="right")
    table.add_column("\nfailed", justify="right")
    loads = list(dict.fromkeys(report.load for report in reports))
    for load in loads:
        runs = [report for report in reports if report.load == load]
        best = [
            _best([report.requests_per_s for report in runs], larger_is_better=True),
            _best([report.output_tokens_per_s for report in runs], larger_is_better=True),
            *(
                _best([_median(of) for of in column], larger_is_better=False)
                for column in zip(*(_shown(report) for report in runs), strict=True)
            ),
        ]
        for number, report in enumerate(runs):
            medians = [_median(of) for of in _shown(report)]
            values = [report.requests_per_s, report.output_tokens_per_s, *medians]
            texts = [
                f"{report.requests_per_s:.3g}",
                f"{report.output_tokens_per_s:.0f}",
                *("–" if of is None else format_pair(of.p50.value, of.p95.value) for of in _shown(report)),
            ]
            cells = [load if number == 0 else ""]
            if num_servers > 1:
                cells.append(escape(report.server))
            for text, value, best_value in zip(texts, values, best, strict=True):
                cells.append(f"[bold]{text}[/bold]" if best_value is not None and value == best_value else text)
            if has_goodput:
                cells.append("–" if report.good_share is None else f"{report.good_share:.0%}")
            failed = report.requests - report.succeeded
            cells.append(f"[red]{failed} of {report.requests}[/red]" if failed else "0")
            table.add_row(*cells)
        if num_servers > 1 and load != loads[-1]:
            table.add_row()
    return table


def _shown(report: Report) -> tuple[Distribution | None, ...]:
    return report.latencies.ttft, report.latencies.token_gap, report.latencies.e2e


def _median(of: Distribution | None) -> float | None:
    return None if of is None else of.p50.value


def _best(values: Sequence[float | None], *, larger_is_better: bool) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return max(known) if larger_is_better else min(known)


def _detail(report: Report) -> Table:
    """All percentiles of one run, each above the interval that chance leaves it in."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("mean", justify="right")
    for percent in PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    table.add_column("slowest", justify="right")
    for name, field in MEASURES:
        distribution: Distribution | None = getattr(report.latencies, field)
        if distribution is None or (field == "client_wait" and distribution.max < NOTEWORTHY_WAIT_S):
            continue
        if field == "chunk_gap" and distribution == report.latencies.token_gap:
            continue  # every chunk was one token
        cells = [_estimate(distribution.percentile(percent)) for percent in PERCENTILES]
        table.add_row(name, format_seconds(distribution.mean), *cells, format_seconds(distribution.max))
    return table


def _estimate(estimate: Estimate) -> str:
    interval = "" if estimate.low == estimate.high else format_pair(estimate.low, estimate.high, "–")
    return f"{format_seconds(estimate.value)}\n[dim]{interval}[/dim]"


def facts(report: Report) -> list[str]:
    """Rates, tokens, the server's own counters and the client's health, a line each."""
    total = "" if report.total_tokens_per_s is None else f", {report.total_tokens_per_s:.0f} with prompts"
    lines = [
        f"{report.requests_per_s:.3g} requests/s, {report.output_tokens_per_s:.1f} output tokens/s{total}"
        f" (over {format_seconds(report.window_s)})"
    ]
    if report.achieved_rate is not None and report.offered_rate is not None:
        lines.append(f"{report.offered_rate:.4g} requests/s offered, {report.achieved_rate:.4g} achieved")
    if report.goodput_per_s is not None and report.good_share is not None:
        lines.append(
            f"goodput {report.goodput_per_s:.3g} requests/s: {report.good_share:.1%} kept "
            f"{' and '.join(report.promises)}"
        )
    prompts = "" if report.prompt_tokens is None else f"{report.prompt_tokens:,} prompt tokens, "
    cached = "" if report.cached_share is None else f", {report.cached_share:.1%} of the prompts cached"
    lines.append(f"{report.succeeded} replies: {prompts}{report.output_tokens:,} output tokens{cached}")
    change = report.server_change
    if change is not None:
        said = [
            _counted(change.preemptions, "preemptions"),
            _counted(change.compilations, "compilations"),
            "" if change.queue_mean_s is None else f"{format_seconds(change.queue_mean_s)} in its queue on the mean",
            "" if change.max_running is None else f"at most {change.max_running:.0f} running",
            "" if change.max_waiting is None else f"{change.max_waiting:.0f} waiting",
            "" if change.max_kv_usage is None else f"{change.max_kv_usage:.0%} of its pages held",
        ]
        lines.append(f"server: {', '.join(part for part in said if part)}")
    client = report.client
    lines.append(
        f"client: {client.cpu_share:.0%} of a core, its event loop {format_seconds(client.lag_p99_s)} late at p99, "
        f"{format_seconds(client.lag_max_s)} at most"
    )
    if 0 < report.succeeded < MIN_REQUESTS_FOR_P99:
        lines.append(f"p99 of {report.succeeded} requests is the slowest of them or nearly so")
    return lines


def _counted(value: float | None, name: str) -> str:
    return "" if value is None else f"{value:.0f} {name}"


def _print_notes(console: Console, report: Report, where: str) -> None:
    """Failures and warnings of one run, under its name."""
    lines = []
    for kind, count in report.failures.items():
        said = f"{where}{count} {kind.replace('_', ' ')}: {report.failure_details.get(kind, '')}"
        lines.append(f"[red]✗[/red] {escape(said)}")
    notes = [*report.warnings, *(f"{count} replies: {odd}" for odd, count in report.oddities.items())]
    lines += [f"[yellow]![/yellow] {escape(where + note)}" for note in notes]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
