"""Writes runs as one HTML file: tables, plots, light and dark; nothing is loaded from anywhere."""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from server.bench.measure import Run
from server.bench.report import Report
from server.bench.slo import format_pair, format_seconds
from server.bench.statistics import PERCENTILES, Distribution
from server.bench.svg import Series, chart
from server.bench.table import MEASURES, facts

NUM_COLOURS = 4
NUM_BINS = 40
# Of a histogram: what is beyond is told beside it.
SHOWN_SHARE = 0.995

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#636c76;--line:#d8dee4;--card:#f6f8fa;
--c0:#1f6fd6;--c1:#c2570c;--c2:#1a7f4b;--c3:#8250bf;--bad:#cf222e}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#8d96a0;--line:#30363d;--card:#161b22;
--c0:#6cb0ff;--c1:#ffa45c;--c2:#56d08b;--c3:#c8a2ff;--bad:#ff7b72}}
body{margin:0 auto;max-width:1000px;padding:24px 16px 64px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:18px;margin:40px 0 8px;border-top:1px solid var(--line);padding-top:24px}
p{margin:4px 0;overflow-wrap:anywhere}.dim,small{color:var(--dim)}.bad{color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:12px 0}
th,td{padding:4px 12px 4px 0;text-align:right;white-space:nowrap;vertical-align:top}
th{font-weight:600;color:var(--dim)}th:first-child,td:first-child,.left{text-align:left}
tbody tr{border-top:1px solid var(--line)}td small{display:block}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:12px;margin:12px 0}
svg{width:100%;height:auto;background:var(--card);border-radius:8px}
svg text{fill:var(--fg);font:11px system-ui,sans-serif}svg .title{font-size:13px;font-weight:600}
svg tspan{font-size:11px;font-weight:400}
svg .tick{fill:var(--dim)}path{fill:none;stroke:var(--k)}.grid,.axis{stroke:var(--line)}
.line{stroke-width:1.8}.dashed{stroke-dasharray:5 4}.dots{stroke-width:4;stroke-linecap:round;stroke-opacity:.6}
.interval{stroke-width:5;stroke-opacity:.25}.bars{fill:var(--k);stroke:none;fill-opacity:.75}
""" + "".join(f"path.{name}{{--k:var(--{name})}}" for name in ("c0", "c1", "c2", "c3", "bad"))


def to_html(runs: Sequence[Run], title: str) -> str:
    """The whole report. `title` is the workload in words."""
    reports = [run.report for run in runs]
    servers = list(dict.fromkeys(report.server for report in reports))
    colours = {server: f"c{number % NUM_COLOURS}" for number, server in enumerate(servers)}
    models = dict.fromkeys(f"{report.model} at {report.server}" for report in reports)
    parts = [
        *(f"<p class=dim>{escape(model)}</p>" for model in models),
        _overview(reports),
        _notes(reports),
    ]
    if len({report.level for report in reports}) > 1:
        parts += ["<h2>Latency against load</h2><div class=plots>", *_against_load(reports, colours), "</div>"]
    for run in runs:
        parts += [
            f"<h2>{escape(run.report.load)} <span class=dim>{escape(run.report.server)}</span></h2>",
            _percentiles(run.report),
            *(f"<p class=dim>{escape(line)}</p>" for line in facts(run.report)),
            "<div class=plots>",
            *_plots(run, colours[run.report.server]),
            "</div>",
        ]
    return page(title, parts)


def page(title: str, body: Iterable[str]) -> str:
    """A whole document in this report's style, its heading the title."""
    head = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>Load: {escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    return "".join([*head, *body, "</body></html>\n"])


def _overview(reports: Sequence[Report]) -> str:
    heads = (
        "load",
        "server",
        "requests/s",
        "output tokens/s",
        "first token p50–p95",
        "token gap",
        "end to end",
        "good",
    )
    rows = []
    for report in reports:
        of = report.latencies
        cells = [
            escape(report.load),
            escape(report.server),
            f"{report.requests_per_s:.3g}",
            f"{report.output_tokens_per_s:.0f}",
            *(
                "–" if one is None else format_pair(one.p50.value, one.p95.value, " – ")
                for one in (of.ttft, of.token_gap)
            ),
            "–" if of.e2e is None else format_pair(of.e2e.p50.value, of.e2e.p95.value, " – "),
            "–" if report.good_share is None else f"{report.good_share:.1%}",
        ]
        failed = report.requests - report.succeeded
        cells.append(f"<span class=bad>{failed} of {report.requests}</span>" if failed else "0")
        rows.append(_row(cells))
    return _table([*heads, "failed"], rows)


def _percentiles(report: Report) -> str:
    rows = []
    for name, field in MEASURES:
        of: Distribution | None = getattr(report.latencies, field)
        if of is None or (field == "chunk_gap" and of == report.latencies.token_gap):
            continue  # every chunk was one token
        cells = [escape(name), format_seconds(of.mean)]
        for percent in PERCENTILES:
            estimate = of.percentile(percent)
            interval = format_pair(estimate.low, estimate.high, "–")
            cells.append(f"{format_seconds(estimate.value)}<small>{interval}</small>")
        rows.append(_row([*cells, format_seconds(of.max)]))
    return _table(["", "mean", *(f"p{percent}" for percent in PERCENTILES), "slowest"], rows)


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _notes(reports: Sequence[Report]) -> str:
    lines = []
    for report in reports:
        where = f"{report.load}, {report.server}"
        for kind, count in report.failures.items():
            lines.append(f"{where}: {count} {kind.replace('_', ' ')}: {report.failure_details.get(kind, '')}")
        lines += [f"{where}: {warning}" for warning in report.warnings]
        lines += [f"{where}: {count} replies: {odd}" for odd, count in report.oddities.items()]
    return "".join(f"<p><span class=bad>!</span> {escape(line)}</p>" for line in lines)


def _against_load(reports: Sequence[Report], colours: dict[str, str]) -> list[str]:
    x_label = "users" if reports[0].offered_rate is None else "requests/s offered"

    def latency(name: str, field: str) -> str:
        series = []
        for server, colour in colours.items():
            for percent, kind in ((50, "line"), (95, "dashed")):
                of = [(report.level, getattr(report.latencies, field)) for report in reports if report.server == server]
                known = [(level, one.percentile(percent)) for level, one in of if one is not None]
                series.append(
                    Series(
                        kind="line" if kind == "line" else "dashed",
                        xs=[level for level, _ in known],
                        ys=[estimate.value * 1e3 for _, estimate in known],
                        lows=[estimate.low * 1e3 for _, estimate in known],
                        highs=[estimate.high * 1e3 for _, estimate in known],
                        colour=colour,
                        label=f"{server} p{percent}" if len(colours) > 1 else f"p{percent}",
                    )
                )
        return chart(name, x_label, "ms", series)

    throughput = [
        Series(
            kind="line",
            xs=[report.level for report in reports if report.server == server],
            ys=[report.output_tokens_per_s for report in reports if report.server == server],
            colour=colour,
            label=server,
        )
        for server, colour in colours.items()
    ]
    return [
        latency("First token", "ttft"),
        latency("Token gap", "token_gap"),
        latency("End to end", "e2e"),
        chart("Throughput", x_label, "output tokens/s", throughput),
    ]


def _plots(run: Run, colour: str) -> list[str]:
    served = [result for result in run.results if result.ok]
    failed = [result for result in run.results if not result.ok]
    firsts = [(result.scheduled_s, result.ttft_s) for result in served if result.ttft_s is not None]
    gaps = [(gap.seconds, gap.tokens) for result in served for gap in result.token_gaps()]
    return [
        chart(
            "First token, by when it was due",
            "s",
            "ms",
            [
                Series(
                    kind="points", xs=[at for at, _ in firsts], ys=[wait * 1e3 for _, wait in firsts], colour=colour
                ),
                Series(
                    kind="crosses",
                    xs=[result.scheduled_s for result in failed],
                    ys=[0.0] * len(failed),
                    colour="bad",
                    label="failed",
                ),
            ],
        ),
        _open_requests(run, colour),
        _token_rate(run, colour),
        _histogram("First token", [wait for _, wait in firsts], [1] * len(firsts), colour, "requests"),
        _histogram("Token gap", [gap for gap, _ in gaps], [tokens for _, tokens in gaps], colour, "tokens"),
        _histogram("End to end", [result.e2e_s for result in served], [1] * len(served), colour, "requests"),
    ]


def _open_requests(run: Run, colour: str) -> str:
    """Requests that are open for the user, and what the server says of its queue."""
    changes = sorted(
        [(result.scheduled_s, 1) for result in run.results] + [(result.end_s, -1) for result in run.results]
    )
    xs, ys, now = [], [], 0
    for at, change in changes:
        xs += [at, at]
        ys += [now, now + change]
        now += change
    series = [Series(kind="line", xs=xs, ys=ys, colour=colour, label="open")]
    for name, label, of in (
        ("num_requests_waiting", "waiting in the server", "c1"),
        ("num_preemptions_total", "", "bad"),
    ):
        known = [(sample.time_s, sample.values[name]) for sample in run.watch.samples if name in sample.values]
        if name == "num_preemptions_total" and known:
            known = [(at, value - known[0][1]) for at, value in known]
            label = "preemptions" if known[-1][1] else ""
        if label and known:
            series.append(
                Series(
                    kind="dashed", xs=[at for at, _ in known], ys=[value for _, value in known], colour=of, label=label
                )
            )
    return chart("Requests at once", "s", "", series)


def _token_rate(run: Run, colour: str) -> str:
    """Tokens as they came, whatever became of their request."""
    times = np.array([chunk.time_s for result in run.results for chunk in result.chunks])
    tokens = np.array([chunk.tokens for result in run.results for chunk in result.chunks], np.float64)
    if not len(times):
        return ""
    width = max(1.0, float(np.ceil(times.max() / 120)))
    counts = np.bincount((times / width).astype(np.int64), weights=tokens) / width
    bins = [number * width for number in range(len(counts))]
    return chart("Output", "s", "tokens/s", [Series(kind="bars", xs=bins, ys=counts.tolist(), colour=colour)])


def _histogram(name: str, values: Sequence[float], weights: Sequence[int], colour: str, unit: str) -> str:
    if not values:
        return ""
    ms = np.asarray(values) * 1e3
    top = float(np.quantile(ms, SHOWN_SHARE, method="inverted_cdf")) or 1.0
    counts, edges = np.histogram(ms, bins=NUM_BINS, range=(0, top), weights=np.asarray(weights))
    beyond = int(np.asarray(weights)[ms > top].sum())
    title = f"{name} ({beyond} beyond)" if beyond else name
    bars = Series(kind="bars", xs=edges[:-1].tolist(), ys=counts.tolist(), colour=colour)
    return chart(title, "ms", unit, [bars])
