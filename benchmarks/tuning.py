"""One setting from promise to YAML: profile, plan on the simulator, confirm, and the same search on real servers.

usage: python benchmarks/tuning.py --folder out [--real]     (15 minutes on two cores, 15 more with --real)
       python benchmarks/tuning.py --folder out --tell --plot docs/images/tuning.png     (at once)

The commands are those of docs/loadtest.md; each is printed with the seconds that it took. Needs the extra "bench".
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from server.bench.slo import format_seconds

KEY = "scheduler.max_num_batched_tokens"
SETTINGS = ["--max-model-len", "1024", "--set", "scheduler.max_num_seqs=16"]
PROMISE = ["--slo", "ttft_p95=1.5s", "--slo", "itl_p95=300ms"]
TRAFFIC = ["--input-tokens", "64-192", "--output-tokens", "8-24", "--requests", "40", "--trial", "15s"]
PLAN = ["plan", *SETTINGS, *PROMISE, *TRAFFIC, "--tolerance", "0.1", "--vary", f"{KEY}=80,144,272"]


def run(command: list[str]) -> float:
    """Seconds."""
    print(f"$ jaxserve {shlex.join(command)}", flush=True)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "server", *command], check=True)
    seconds = time.perf_counter() - start
    print(f"# {seconds:.0f} s\n", flush=True)
    return seconds


def measure(folder: Path, *, real: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    times = folder / "times.json"
    spent = {"profile": run(["profile", *SETTINGS, "--seconds", "60", "--output", str(times)])}
    outputs = ["--json", str(folder / "simulated.json"), "--output", str(folder / "best.yaml")]
    spent["simulated"] = run([*PLAN, "--simulate", "--times", str(times), *outputs])
    if real:
        spent["real"] = run([*PLAN, "--json", str(folder / "real.json")])
    (folder / "seconds.json").write_text(json.dumps(spent))


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The candidates of each way to search, in the order in which they were tried."""
    told = json.loads((folder / "simulated.json").read_text())
    found = {"simulated": told["simulated"], "confirmed": told["candidates"]}
    if (folder / "real.json").exists():
        found["searched for real"] = json.loads((folder / "real.json").read_text())["candidates"]
    return found


def value_of(candidate: dict[str, Any]) -> str:
    return ", ".join(candidate["settings"]).removeprefix(f"{KEY}=") or "auto (528)"


def tell(folder: Path) -> None:
    """The documentation's table."""
    found = read(folder)
    values = list(dict.fromkeys(value_of(one) for candidates in found.values() for one in candidates))
    alone = {value_of(one): one["alone"] for one in found["simulated"]}
    print(f"| {KEY} | alone | {' | '.join(f'{name}: requests/s, breaks by' for name in found)} |")
    print("| --- " * (2 + len(found)) + "|")
    for value in values:
        cells = ["; ".join(format_seconds(outcome["reached"]["value"]) for outcome in alone[value]["outcomes"])]
        for candidates in found.values():
            of_value = [one for one in candidates if value_of(one) == value]
            cells += [f"{one['knee']:.2f}, {one['breaks_by'] or 'nothing'}" for one in of_value] or [""]
        print(f"| {value} | {' | '.join(cells)} |")
    print(f"\nseconds: {(folder / 'seconds.json').read_text()}\n\n{(folder / 'best.yaml').read_text()}")


def draw(folder: Path, path: Path) -> None:
    """Both promises against the rate, a line for each value, simulated; real trials as points of the same colour."""
    found = read(folder)
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, 2))
    for number, ax in enumerate(axes):
        for colour, candidate in enumerate(found["simulated"]):
            _curve(ax, candidate, number, f"C{colour}", line=True)
            real = found.get("searched for real", found["confirmed"])
            for same in (one for one in real if value_of(one) == value_of(candidate)):
                _curve(ax, same, number, f"C{colour}", line=False)
        promise = found["simulated"][0]["alone"]["outcomes"][number]["promise"]
        ax.axhline(promise["limit_s"], color="tab:red", linestyle="--")
        ax.set(xlabel="requests/s offered", ylabel=f"{promise['measure']} p{promise['percent']}, s", yscale="log")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis("{x:.2g}")
        ax.grid(alpha=0.3, which="both")
    axes[0].legend(title="tokens a step")
    figure.suptitle("lines: simulated (medians); points: measured; dashed: promised", fontsize=9)
    figure.savefig(path, dpi=110)


def _curve(ax: Axes, candidate: dict[str, Any], number: int, colour: str, *, line: bool) -> None:
    trials = [trial for trial in candidate["trials"] if len(trial["outcomes"]) > number]
    seconds: dict[float, list[float]] = {}
    for trial in trials:
        seconds.setdefault(trial["rate"], []).append(trial["outcomes"][number]["reached"]["value"])
    if line:
        ax.plot(list(seconds), list(map(median, seconds.values())), color=colour, label=value_of(candidate))
    else:
        points = [(rate, value) for rate, values in seconds.items() for value in values]
        ax.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, alpha=0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for what the commands write")
    parser.add_argument("--real", action="store_true", help="search once more, without the simulator")
    parser.add_argument("--tell", action="store_true", help="only print what is in the folder")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if not options.tell:
        measure(options.folder, real=options.real)
    tell(options.folder)
    if options.plot is not None:
        draw(options.folder, options.plot)


if __name__ == "__main__":
    main()
