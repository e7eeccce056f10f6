"""The command `plan`: how much load keeps a promise, what breaks first, and which setting moves it."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from jaxserve.errors import ConfigError
from jaxserve.startup.loading import resolve_for
from models.checkpoint import open_checkpoint, resolve_model
from server.bench.errors import BenchError
from server.bench.flags import add_text_flags, count, natural, positive, positive_time, read_workload
from server.bench.slo import Promise, parse_promise
from server.cli.simulation import step_times
from server.config import ServeConfig
from server.planning.live import CAPACITY_CONCURRENCY, LiveServer
from server.planning.load import PlannedLoad
from server.planning.search import FIRST_SHARE, Knee, find_knee
from server.planning.servers import running_server
from server.planning.simulated import SimulatedServer
from server.planning.sweep import Candidate, Variation, best, parse_variation, sweep
from server.planning.telling import print_candidates, print_knee, to_html, to_json, trial_line
from server.planning.trial import Trial

# Where a simulated knee is looked for on the real server: the simulator's own error, and some.
CONFIRM_WITHIN = (0.8, 1.2)
CONFIRMED = 2

Configure = Callable[[tuple[str, ...]], ServeConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """What is asked: of which traffic, by which promises, how exactly."""

    load: PlannedLoad
    promises: tuple[Promise, ...]
    variations: tuple[Variation, ...]
    tolerance: float


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo",
        dest="slos",
        action="append",
        required=True,
        metavar="X_pN=TIME",
        help="the promise, such as ttft_p95=500ms; also itl, tpot, e2e and p50, p90, p99; may be repeated",
    )
    where = parser.add_argument_group("where (default: servers of the configuration, started here)")
    where.add_argument("--url", help="a server that runs already, any of OpenAI's API; its settings stay as they are")
    where.add_argument("--api-key", help="for --url, sent as a bearer token")
    where.add_argument(
        "--concurrency",
        type=count,
        default=CAPACITY_CONCURRENCY,
        metavar="N",
        help="for --url, users who surely fill it; what they get is the most that is looked for; default: 64",
    )
    where.add_argument(
        "--simulate", action="store_true", help="search on the simulator, then confirm the best two on real servers"
    )
    where.add_argument("--times", type=Path, metavar="FILE", help="of --simulate: what `jaxserve profile` wrote")
    where.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="A.B=C,D",
        help="try these values of a setting; repeated, one setting after the other, the best kept",
    )

    load = parser.add_argument_group("the traffic that the promise is for")
    load.add_argument(
        "--workload", choices=("random", "shared-prefix", "multi-turn"), default="random", help="default: random"
    )
    add_text_flags(load)
    load.add_argument("--arrivals", choices=("constant", "poisson", "gamma"), default="poisson")
    load.add_argument("--burstiness", type=positive, default=1.0, metavar="B", help="gamma's shape: below 1 in bursts")
    load.add_argument("--requests", type=count, default=100, metavar="N", help="of a trial, at least; default: 100")
    load.add_argument("--trial", default="30s", metavar="TIME", help="arrivals of a trial, at least; default: 30s")
    load.add_argument("--seed", type=natural, default=0, help="of arrivals, lengths and texts; default: 0")

    told = parser.add_argument_group("how exactly, and where to")
    told.add_argument("--tolerance", type=positive, default=0.05, help="of the knee; default: 0.05")
    told.add_argument("--output", type=Path, metavar="FILE", help="the recommended configuration, YAML")
    told.add_argument("--json", type=Path, metavar="FILE", help="every trial")
    told.add_argument("--html", type=Path, metavar="FILE", help="the curves, in one file")


def run_plan(configure: Configure, parsed: argparse.Namespace) -> int:
    """Answers, prints and writes. Raises BenchError, ConfigError.

    Args:
      configure: the command line's configuration with some more `a.b=c` set.
    """
    question = _question(parsed)
    console = Console(stderr=True)
    simulated: list[Candidate] = []
    if parsed.url is not None:
        if question.variations or parsed.simulate or parsed.output is not None:
            raise ConfigError(
                "--url is a server as it is: --vary, --simulate and --output are for servers that are started here"
            )
        headers = {} if parsed.api_key is None else {"authorization": f"Bearer {parsed.api_key}"}
        found = _knee_at(parsed.url, question, console, concurrency=parsed.concurrency, headers=headers)
        candidates = [Candidate(assignments=(), knee=found)]
    else:
        for variation in question.variations:  # a wrong value is told now, not after an hour
            for value in variation.values:
                configure((f"{variation.key}={value}",))
        if parsed.simulate:
            candidates, simulated = _simulated(configure, question, parsed, console)
        else:
            candidates = list(
                sweep(question.variations, lambda settings: _knee_of(configure(settings), settings, question, console))
            )
    chosen = best(candidates)
    _tell(Console(), candidates, chosen, question)
    _write(parsed, configure, candidates, chosen, question, simulated)
    return 0


def _question(parsed: argparse.Namespace) -> _Question:
    promises = tuple(parse_promise(text) for text in parsed.slos)
    for promise in promises:
        if promise.percent is None:
            raise BenchError(f"--slo {promise} says of no share of the requests; write {promise.measure}_p95=…")
    for path in (parsed.output, parsed.json, parsed.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise BenchError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    workload = read_workload(parsed)
    if parsed.simulate and workload.turns > 1:
        raise ConfigError("a simulation knows single requests only: drop --workload multi-turn, or --simulate")
    load = PlannedLoad(
        workload=workload,
        process=parsed.arrivals,
        burstiness=parsed.burstiness,
        least_requests=parsed.requests,
        least_s=positive_time("--trial", parsed.trial),
        seed=parsed.seed,
    )
    return _Question(
        load=load,
        promises=promises,
        variations=tuple(parse_variation(text) for text in parsed.vary),
        tolerance=parsed.tolerance,
    )


def _knee_of(
    config: ServeConfig,
    settings: Sequence[str],
    question: _Question,
    console: Console,
    bracket: tuple[float, float] | None = None,
) -> Knee:
    """On a server of its own."""
    console.print(f"starting a server, {', '.join(settings) or 'as configured'}", highlight=False)
    with running_server(config) as url:
        return _knee_at(url, question, console, concurrency=2 * config.scheduler.max_num_seqs, bracket=bracket)


def _knee_at(
    url: str,
    question: _Question,
    console: Console,
    *,
    concurrency: int,
    bracket: tuple[float, float] | None = None,
    headers: dict[str, str] | None = None,
) -> Knee:
    server = LiveServer(
        url, question.load, question.promises, concurrency=concurrency, headers=headers, console=console
    )
    for note in server.notes:
        console.print(f"[yellow]![/yellow] {note}", highlight=False)
    return _search(server, question, console, bracket)


def _search(
    server: LiveServer | SimulatedServer,
    question: _Question,
    console: Console,
    bracket: tuple[float, float] | None = None,
) -> Knee:
    def trial_of(rate: float, repeat: int) -> Trial:
        trial = server.trial(rate, repeat)
        console.print(trial_line(trial), highlight=False, soft_wrap=True)
        return trial

    capacity = server.capacity()
    if capacity <= 0:
        raise BenchError("the server answered nothing: there is no rate to look for")
    console.print(f"{capacity:8.2f} requests/s when there are always enough", highlight=False)
    alone = server.alone()
    console.print(trial_line(alone), highlight=False, soft_wrap=True)
    if isinstance(server, LiveServer):
        rate = capacity * FIRST_SHARE
        seconds = question.load.count(rate) / rate
        console.print(f"a trial takes about {seconds:.0f} s, and a search ten of them or so", highlight=False)
    return find_knee(trial_of, alone=alone, capacity=capacity, tolerance=question.tolerance, bracket=bracket)


def _simulated(
    configure: Configure, question: _Question, parsed: argparse.Namespace, console: Console
) -> tuple[list[Candidate], list[Candidate]]:
    """Searches on the simulator; the best ones with the knees of real servers, and all as they were simulated."""
    base = configure(())
    model = open_checkpoint(resolve_model(base.model.path)).config
    times = step_times(resolve_for(base, model), parsed.times)

    def knee_of(settings: tuple[str, ...]) -> Knee:
        console.print(f"simulating, {', '.join(settings) or 'as configured'}", highlight=False)
        server = SimulatedServer(resolve_for(configure(settings), model), times, question.load, question.promises)
        return _search(server, question, console)

    simulated = list(sweep(question.variations, knee_of))
    if question.variations:
        print_candidates(Console(), simulated, best(simulated))
    candidates = []
    chosen = sorted(simulated, key=lambda one: -one.knee.rate)[:CONFIRMED]
    if simulated[0] not in chosen:  # what a change is worth is known beside the configuration as it is
        chosen.append(simulated[0])
    for candidate in chosen:
        low, high = (share * candidate.knee.rate for share in CONFIRM_WITHIN)
        config = configure(candidate.assignments)
        knee = _knee_of(config, candidate.assignments, question, console, (low, high) if high else None)
        error = f", {candidate.knee.rate / knee.rate - 1:+.0%}" if knee.rate else ""
        console.print(
            f"{candidate.name}: simulated {candidate.knee.rate:.2f} requests/s, real {knee.rate:.2f}{error}",
            highlight=False,
        )
        candidates.append(Candidate(assignments=candidate.assignments, knee=knee))
    # The fewest changes first: only a sure gain is worth one.
    return sorted(candidates, key=lambda one: len(one.assignments)), simulated


def _tell(console: Console, candidates: Sequence[Candidate], chosen: Candidate, question: _Question) -> None:
    if len(candidates) > 1:
        print_candidates(console, candidates, chosen)
    print_knee(console, chosen.name, chosen.knee, question.promises)


def _write(
    parsed: argparse.Namespace,
    configure: Configure,
    candidates: Sequence[Candidate],
    chosen: Candidate,
    question: _Question,
    simulated: Sequence[Candidate],
) -> None:
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(to_json(candidates, chosen, simulated), indent=1))
    if parsed.html is not None:
        parsed.html.write_text(to_html(candidates, chosen, question.promises), encoding="utf-8")
    if parsed.output is not None:
        settings = configure(chosen.assignments).model_dump(mode="json", exclude_defaults=True)
        promised = ", ".join(map(str, question.promises))
        head = f"# `jaxserve plan`: {promised} holds up to {chosen.knee.rate:.2f} requests/s.\n"
        parsed.output.write_text(head + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    for path in (parsed.json, parsed.html, parsed.output):
        if path is not None:
            print(f"wrote {path}")
