"""Draws the Grafana dashboard from a running server's own metrics, where no Grafana is at hand.

usage: python benchmarks/dashboard.py --url http://127.0.0.1:8000 [--seconds 180] [--out docs/images/grafana.png]

Scrapes /metrics once a second, evaluates the queries of configs/monitoring/grafana-dashboard.json over what came, and
draws each panel where the dashboard has it. Only the part of PromQL that the dashboard uses is known: `sum`, `avg`,
`sum by`, `rate`, `histogram_quantile`, differences, quotients and `> 0`. Needs the extra "bench".
"""

import argparse
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[1] / "configs" / "monitoring" / "grafana-dashboard.json"
SCRAPE_S = 1.0
RATE_S = 20.0  # what $__rate_interval is here
GRID_WIDTH, UNIT_INCHES = 24, 0.55
_TOKEN = re.compile(r"\s*(\{[^}]*\}|\[[^]]*\]|[\w:]+(?:\.\d+)?|[()/,>-])")

# One value a scrape for each set of labels.
Labels = frozenset[tuple[str, str]]
Vector = Mapping[Labels, np.ndarray]


class Scrapes:
    """What /metrics said over time. Attributes: times: seconds, float64[scrapes]."""

    def __init__(self, url: str, seconds: float) -> None:
        times: list[float] = []
        rows: list[dict[tuple[str, Labels], float]] = []
        start = time.monotonic()
        while (now := time.monotonic() - start) < seconds:
            text = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
            times.append(now)
            rows.append(
                {
                    (sample.name, frozenset(sample.labels.items())): sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                }
            )
            time.sleep(max(0.0, SCRAPE_S - (time.monotonic() - start - now)))
        self.times = np.array(times)
        self._rows = rows

    def select(self, name: str) -> Vector:
        """Every series of this name; a scrape that lacks one has nan."""
        keys = {key for row in self._rows for key in row if key[0] == name}
        return {labels: np.array([row.get((name, labels), np.nan) for row in self._rows]) for _, labels in keys}

    def rate(self, series: np.ndarray) -> np.ndarray:
        """Increase a second over the last `RATE_S`; nan before there is as much. A series begins at its first value."""
        before = np.searchsorted(self.times, self.times - RATE_S)
        known = np.where(np.isnan(series), 0.0, series)
        elapsed = np.maximum(self.times - self.times[before], 1e-9)
        return np.where(self.times >= RATE_S, (known - known[before]) / elapsed, np.nan)


class Query:
    """A recursive-descent evaluation of one expression."""

    def __init__(self, text: str, scrapes: Scrapes) -> None:
        self._tokens = [match[1] for match in _TOKEN.finditer(text)]
        assert "".join(self._tokens) == re.sub(r"\s", "", text), f"cannot read {text}"
        self._scrapes = scrapes

    def evaluate(self) -> Vector:
        value = self._difference()
        assert not self._tokens, f"left over: {self._tokens}"
        return value

    def _take(self, expected: str | None = None) -> str:
        token = self._tokens.pop(0)
        assert expected is None or token == expected, f"{token}, not {expected}"
        return token

    def _next_is(self, token: str) -> bool:
        return bool(self._tokens) and self._tokens[0] == token

    def _difference(self) -> Vector:
        value = self._quotient()
        while self._next_is("-"):
            self._take()
            other = self._quotient()
            value = {frozenset(): _only(value) - _only(other)}
        return value

    def _quotient(self) -> Vector:
        value = self._term()
        while self._next_is("/"):
            self._take()
            with np.errstate(divide="ignore", invalid="ignore"):
                value = {frozenset(): _only(value) / _only(self._term())}
        return value

    def _term(self) -> Vector:
        token = self._take()
        if token == "(":
            value = self._difference()
            if self._next_is(">"):
                self._take()
                limit = float(self._take())
                value = {labels: np.where(series > limit, series, np.nan) for labels, series in value.items()}
            self._take(")")
            return value
        if token in ("sum", "avg"):
            return self._aggregate(token)
        if token == "rate":
            self._take("(")
            value = {labels: self._scrapes.rate(series) for labels, series in self._selector(self._take()).items()}
            self._take(")")
            return value
        if token == "histogram_quantile":
            self._take("(")
            share = float(self._take())
            self._take(",")
            value = {frozenset(): quantile(share, self._difference())}
            self._take(")")
            return value
        if re.fullmatch(r"\d+(\.\d+)?", token):
            return {frozenset(): np.full(len(self._scrapes.times), float(token))}
        return self._selector(token)

    def _selector(self, name: str) -> Vector:
        """A name; its braces only choose the models, all of which are shown, and its brackets the window."""
        while self._tokens and self._tokens[0][0] in "{[":
            self._take()
        return self._scrapes.select(name)

    def _aggregate(self, kind: str) -> Vector:
        kept: tuple[str, ...] = ()
        if self._next_is("by"):
            self._take()
            self._take("(")
            kept = (self._take(),)
            self._take(")")
        self._take("(")
        groups: dict[Labels, list[np.ndarray]] = {}
        for labels, series in self._difference().items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in kept), []).append(series)
        self._take(")")
        return {labels: _combined(kind, np.stack(series)) for labels, series in groups.items()}


def _combined(kind: str, stacked: np.ndarray) -> np.ndarray:
    """nan where no series has a value."""
    count = np.count_nonzero(~np.isnan(stacked), axis=0)
    total = np.where(count > 0, np.nansum(stacked, axis=0), np.nan)
    return total if kind == "sum" else total / np.maximum(count, 1)


def _only(vector: Vector) -> np.ndarray:
    (series,) = vector.values()
    return series


def quantile(share: float, buckets: Vector) -> np.ndarray:
    """Prometheus' histogram_quantile: linear inside the bucket that the share falls into."""
    edges = {float(dict(labels)["le"]): series for labels, series in buckets.items()}
    bounds = np.array(sorted(edges))
    counts = np.stack([edges[bound] for bound in bounds])  # [buckets, scrapes], cumulative
    found = np.full(counts.shape[1], np.nan)
    for at, column in enumerate(counts.T):
        if not column[-1] > 0:
            continue
        wanted = share * column[-1]
        bucket = int(np.searchsorted(column, wanted))
        if bounds[bucket] == np.inf:
            found[at] = bounds[bucket - 1]
            continue
        low, below = (bounds[bucket - 1], column[bucket - 1]) if bucket else (0.0, 0.0)
        found[at] = low + (bounds[bucket] - low) * (wanted - below) / (column[bucket] - below)
    return found


def draw(dashboard: Mapping[str, Any], scrapes: Scrapes, out: Path) -> None:
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    figure = Figure(figsize=(GRID_WIDTH * UNIT_INCHES, height * UNIT_INCHES / 2), facecolor="#f4f5f5")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, bottom = place["x"] / GRID_WIDTH, 1 - (place["y"] + place["h"]) / height
        width, tall = place["w"] / GRID_WIDTH, place["h"] / height
        axes = figure.add_axes((left + 0.05, bottom + 0.2 * tall, width - 0.065, 0.62 * tall))
        _draw_panel(axes, panel, scrapes)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)


def _draw_panel(axes: Any, panel: Mapping[str, Any], scrapes: Scrapes) -> None:
    for target in panel["targets"]:
        for labels, series in Query(target["expr"], scrapes).evaluate().items():
            name = re.sub(r"\{\{(\w+)\}\}", lambda match, labels=labels: dict(labels)[match[1]], target["legendFormat"])
            axes.plot(scrapes.times, series, label=name, linewidth=1.2)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_title(panel["title"], loc="left", fontsize=9, fontweight="bold")
    axes.set_xlim(0, scrapes.times[-1])
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(color="#e0e0e0", linewidth=0.5)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{int(seconds) // 60}:{int(seconds) % 60:02}"))
    if unit != "short":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, unit)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=5, fontsize=7, frameon=False)


def with_unit(value: float, unit: str) -> str:
    """As Grafana writes it."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "reqps":
        return f"{value:g} req/s"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:g} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--out", type=Path, default=Path("docs/images/grafana.png"))
    options = parser.parse_args()
    draw(json.loads(DASHBOARD.read_text()), Scrapes(options.url, options.seconds), options.out)


if __name__ == "__main__":
    main()
