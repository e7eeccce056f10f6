"""Tells what a search found: a table while it goes and after, the curve as SVG, all of it as JSON; decides nothing."""

import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.bench.html import page
from server.bench.slo import Promise, format_seconds
from server.bench.svg import Series, chart
from server.bench.table import print_table
from server.planning.search import Knee
from server.planning.sweep import WORTH, Candidate
from server.planning.trial import EXPLAINED, Trial, cause_of

# Where the rates in doubt lie further apart than this, the knee is not one to count on.
IN_DOUBT = 1.25
_VERDICTS = {"kept": "[green]kept[/green]", "broken": "[red]broken[/red]", "unclear": "[yellow]unclear[/yellow]"}


def trial_line(trial: Trial) -> str:
    """One trial in a line, for whoever watches."""
    outcomes = "; ".join(map(str, trial.outcomes)) or "nothing succeeded"
    failed = f"; {trial.failure_share:.0%} failed" if trial.failure_share else ""
    rate = f"{trial.rate:8.2f} requests/s" if trial.rate else f"{'one user alone':>19}"
    return f"{rate}: {outcomes}{failed} - {_VERDICTS[trial.verdict]}"


def print_knee(console: Console, name: str, knee: Knee, promises: Sequence[Promise]) -> None:
    """The trials by rate, and the answer in words."""
    table = Table(title=escape(name), title_justify="left")
    table.add_column("requests/s", justify="right")
    table.add_column("requests", justify="right")
    for promise in promises:
        table.add_column(f"{promise.measure} p{promise.percent}, of {format_seconds(promise.limit_s)}", justify="right")
    table.add_column("output tokens/s", justify="right")
    table.add_column("")
    for trial in (knee.alone, *knee.trials):
        cells = [f"{trial.rate:.2f}" if trial.rate else "one user", str(trial.requests)]
        for promise in promises:
            outcome = next((one for one in trial.outcomes if one.promise == promise), None)
            cells.append(
                "-" if outcome is None else _interval(outcome.reached.value, outcome.reached.low, outcome.reached.high)
            )
        table.add_row(*cells, f"{trial.output_tokens_per_s:.0f}", _VERDICTS[trial.verdict])
    print_table(console, table)
    for line in answer(knee):
        console.print(escape(line), highlight=False, soft_wrap=True)


def answer(knee: Knee) -> list[str]:
    """What to promise, and what breaks first above it."""
    at_knee, broken = knee.at_knee, knee.first_broken
    lines = []
    if knee.alone.verdict == "broken":
        lines.append("no rate keeps the promise: a user alone breaks it already")
    elif at_knee is None:
        lowest = knee.trials[0]
        lines.append(
            f"no rate keeps the promise: at {lowest.rate:.2f} requests/s, {100 * lowest.rate / knee.capacity:.0f} % of "
            f"what the server can do, {'; '.join(map(str, lowest.outcomes)) or 'nothing succeeded'}"
        )
    else:
        lines.append(
            f"the promise holds up to {knee.rate:.2f} requests/s ({at_knee.output_tokens_per_s:.0f} output tokens/s), "
            f"{knee.rate / knee.capacity:.0%} of the {knee.capacity:.2f} that the server does without one"
        )
    if broken is not None:
        worst = max(broken.outcomes, key=lambda outcome: outcome.ratio, default=None)
        where = f"at {broken.rate:.2f} it breaks" if broken.rate else "alone"
        lines.append(
            f"{where}: {worst if worst is not None else 'every request failed'}; {EXPLAINED[cause_of(broken)]}"
        )
    elif at_knee is not None:
        lines.append("nothing broke up to there: the server is full before it is slow")
    low, high = knee.in_doubt
    if at_knee is not None and broken is not None and high > low * IN_DOUBT:
        rates = f"from {low:.2f} to {high:.2f}" if low else f"up to {high:.2f}"
        lines.append(
            f"{rates} requests/s chance decides between kept and broken: more --requests would tell, or a promise that "
            "is less near to what a user alone sees"
        )
    return lines


def print_candidates(console: Console, candidates: Sequence[Candidate], chosen: Candidate) -> None:
    """Every configuration that was tried, and which one is worth having."""
    table = Table(title="settings", title_justify="left")
    table.add_column("")
    table.add_column("requests/s within the promise", justify="right")
    table.add_column("of the first", justify="right")
    table.add_column("breaks by")
    first = candidates[0].knee.rate
    for candidate in candidates:
        broken = candidate.knee.first_broken
        marked = f"[bold]{escape(candidate.name)}[/bold]" if candidate is chosen else escape(candidate.name)
        share = f"{candidate.knee.rate / first:.2f}" if first else "-"
        table.add_row(marked, f"{candidate.knee.rate:.2f}", share, cause_of(broken) if broken is not None else "")
    print_table(console, table)
    if chosen is candidates[0] and len(candidates) > 1:
        console.print(f"no change moves the knee by more than {WORTH - 1:.0%}: keep the configuration", highlight=False)


def curve(name: str, knee: Knee, promise: Promise) -> str:
    """One promise against the rate, its limit dashed, as an `<svg>`."""
    points = [
        (trial.rate, outcome.reached)
        for trial in knee.trials
        for outcome in trial.outcomes
        if outcome.promise == promise
    ]
    if not points:
        return ""
    xs = [rate for rate, _ in points]
    measured = Series(
        kind="line",
        xs=xs,
        ys=[reached.value for _, reached in points],
        lows=[reached.low for _, reached in points],
        highs=[reached.high for _, reached in points],
        label=f"{promise.measure} p{promise.percent}",
    )
    limit = Series(kind="dashed", xs=[0.0, max(xs)], ys=[promise.limit_s] * 2, colour="bad", label="promised")
    return chart(name, "requests/s", "seconds", [measured, limit])


def to_html(candidates: Sequence[Candidate], chosen: Candidate, promises: Sequence[Promise]) -> str:
    """One file: every configuration's curves and answer, the chosen one first."""
    parts = []
    for candidate in [chosen, *(one for one in candidates if one is not chosen)]:
        parts.append(f"<h2>{html.escape(candidate.name)}</h2>")
        parts += [f"<p>{html.escape(line)}</p>" for line in answer(candidate.knee)]
        parts += ["<div class=plots>", *(curve(str(one), candidate.knee, one) for one in promises), "</div>"]
    return page(", ".join(map(str, promises)), parts)


def to_json(candidates: Sequence[Candidate], chosen: Candidate, simulated: Sequence[Candidate] = ()) -> dict[str, Any]:
    """All of it, for other programs; times in seconds."""
    return {
        "candidates": [{"chosen": one is chosen, **_candidate_json(one)} for one in candidates],
        "simulated": [_candidate_json(one) for one in simulated],
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    knee = candidate.knee
    return {
        "settings": list(candidate.assignments),
        "knee": knee.rate,
        "capacity": knee.capacity,
        "in_doubt": knee.in_doubt,
        "breaks_by": cause_of(knee.first_broken) if knee.first_broken is not None else None,
        "alone": {**asdict(knee.alone), "verdict": knee.alone.verdict},
        "trials": [{**asdict(trial), "verdict": trial.verdict} for trial in knee.trials],
    }


def _interval(value: float, low: float, high: float) -> str:
    if low == high:
        return format_seconds(value)
    return f"{format_seconds(value)} ({format_seconds(low)} to {format_seconds(high)})"
