"""The flags of `jaxserve bench`, and the plan that they come to; asks no server and sends nothing."""

import argparse
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.bench.arrivals import Process, Rate, parse_rate
from server.bench.dataset import TimeUnit
from server.bench.errors import BenchError
from server.bench.slo import Promise, parse_promise, parse_seconds
from server.bench.workload import Api, Range, Workload

DEFAULT_URL = "http://127.0.0.1:8000"
# One user, a few, many: what it does alone, and what is left of that when it is busy.
DEFAULT_USERS = (1, 4, 16)
DEFAULT_CLOSED_S, DEFAULT_OPEN_S = 20.0, 60.0
DEFAULT_MAX_FAILURE_SHARE = 0.01
KEY_VARIABLE = "OPENAI_API_KEY"
_OUR_FIELDS = {"model", "stream", "n", "messages", "prompt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    name: str
    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """Attributes:
    users: of closed loops, one run each; or `rates` of open loops; or neither, for a trace.
    max_turns, output_tokens: of conversations in a file; None: as many tokens as were recorded.
    num_requests, duration_s: of each run; whichever comes first ends it.
    num_warmup: requests before each run.
    fields: of every body, in place of its own.
    """

    servers: tuple[Server, ...]
    model: str | None
    api_key: str | None
    workload: Workload
    max_turns: int
    output_tokens: int | None
    jsonl: Path | None
    sharegpt: Path | None
    trace: Path | None
    time_unit: TimeUnit
    speed: float
    users: tuple[int, ...]
    rates: tuple[Rate, ...]
    process: Process
    burstiness: float
    max_concurrency: int | None
    num_requests: int | None
    duration_s: float | None
    num_warmup: int
    fields: dict[str, Any]
    seed: int
    promises: tuple[Promise, ...]
    timeout_s: float
    stall_s: float
    max_failure_share: float
    json: Path | None
    html: Path | None
    verbose: bool

    @property
    def is_made_up(self) -> bool:
        """Whether texts are random, so that how long a reply wants to be means nothing."""
        return self.jsonl is None and self.sharegpt is None


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        dest="urls",
        action="append",
        metavar="[NAME=]URL",
        help=f"of the server; default: {DEFAULT_URL}. Given twice, both get the same load and are shown side by side",
    )
    parser.add_argument("--model", help="the id to ask for; default: the first that the server lists")
    parser.add_argument("--api-key", help=f"sent as a bearer token; default: ${KEY_VARIABLE}")

    load = parser.add_argument_group("when requests are sent (default: 1, then 4, then 16 users for 20 s each)")
    when = load.add_mutually_exclusive_group()
    when.add_argument("--concurrency", metavar="N[,N..]", help="users who each wait for their reply; a run for each N")
    when.add_argument(
        "--rate", metavar="R[,R..]", help="requests per second, a run for each; 1..20 ramps; inf: at once"
    )
    when.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines with a timestamp, replayed")
    load.add_argument(
        "--arrivals", choices=("constant", "poisson", "gamma"), default="poisson", help="for --rate; default: poisson"
    )
    load.add_argument(
        "--burstiness", type=positive, default=None, metavar="B", help="gamma's shape: below 1 in bursts, 1: poisson"
    )
    load.add_argument("--max-concurrency", type=count, metavar="N", help="of --rate and --trace; others wait here")
    load.add_argument("--requests", type=count, metavar="N", help="of each run")
    load.add_argument("--duration", metavar="TIME", help="of each run, such as 30s; replies are waited for")
    load.add_argument("--warmup", type=natural, default=4, metavar="N", help="requests before each run; default: 4")
    load.add_argument("--time-unit", choices=("s", "ms"), default="s", help="of a trace's timestamps; default: s")
    load.add_argument("--speed", type=positive, default=1.0, metavar="X", help="2 replays a trace in half its time")

    what = parser.add_argument_group("what is sent (default: random texts)")
    source = what.add_mutually_exclusive_group()
    source.add_argument(
        "--workload", choices=("random", "shared-prefix", "multi-turn"), help="made-up texts; default: random"
    )
    source.add_argument("--jsonl", type=Path, metavar="FILE", help="bodies of OpenAI's API, one a line")
    source.add_argument("--sharegpt", type=Path, metavar="FILE", help="conversations in ShareGPT's form")
    add_text_flags(what)
    what.add_argument(
        "--extra-body", metavar="JSON", help="fields of every request over its own: '{\"temperature\": 0.8}'"
    )
    what.add_argument("--seed", type=natural, default=0, help="of arrivals, lengths and texts; default: 0")

    judged = parser.add_argument_group("how it is judged and told")
    judged.add_argument(
        "--slo", dest="slos", action="append", default=[], metavar="X=TIME", help="ttft, itl, tpot or e2e; for goodput"
    )
    judged.add_argument("--timeout", default="600s", metavar="TIME", help="of a request; default: 600s")
    judged.add_argument("--stall-timeout", default="60s", metavar="TIME", help="of silence after a token; default: 60s")
    judged.add_argument(
        "--max-failure-share",
        type=share,
        default=DEFAULT_MAX_FAILURE_SHARE,
        metavar="X",
        help="of any run; past it the exit status is 1; default: 0.01",
    )
    judged.add_argument("--json", type=Path, metavar="FILE", help="everything, each request and token included")
    judged.add_argument("--html", type=Path, metavar="FILE", help="a report with plots, in one file")
    judged.add_argument("--verbose", action="store_true", help="all percentiles of every run")


def add_text_flags(group: argparse._ArgumentGroup) -> None:
    """Of made-up texts; `read_workload` reads them, and a `--workload`."""
    group.add_argument(
        "--api", choices=("chat", "completions"), default="chat", help="for made-up texts; default: chat"
    )
    group.add_argument("--input-tokens", type=_range, metavar="N[-M]", help="default: 256; of a question, 64")
    group.add_argument("--output-tokens", type=_range, metavar="N[-M]", help="default: 64; of ShareGPT: as recorded")
    group.add_argument("--prefix-tokens", type=count, default=1024, metavar="N", help="of shared-prefix; default: 1024")
    group.add_argument("--prefixes", type=count, default=8, metavar="N", help="different ones; default: 8")
    group.add_argument("--turns", type=count, default=4, metavar="N", help="of multi-turn and ShareGPT; default: 4")
    group.add_argument("--think-time", default="0", metavar="TIME", help="before a next turn, or a user's next request")


def read_plan(parsed: argparse.Namespace) -> BenchPlan:
    """Checks flags against each other. Raises BenchError."""
    duration_s = None if parsed.duration is None else positive_time("--duration", parsed.duration)
    users, rates = _levels(parsed, duration_s)
    if parsed.burstiness is not None and parsed.arrivals != "gamma":
        raise BenchError(f"--burstiness is for --arrivals gamma, not for {parsed.arrivals}")
    if parsed.arrivals == "gamma" and parsed.burstiness is None:
        raise BenchError("--arrivals gamma needs --burstiness, such as 0.25")
    if users and parsed.max_concurrency is not None:
        raise BenchError("--max-concurrency is for --rate and --trace; users of a closed loop are --concurrency")
    if parsed.trace is not None and (parsed.jsonl or parsed.sharegpt or parsed.workload):
        raise BenchError("--trace brings its own requests; leave --workload, --jsonl and --sharegpt out")
    if (
        duration_s is None
        and parsed.requests is None
        and parsed.trace is None
        and not (parsed.jsonl or parsed.sharegpt)
    ):
        duration_s = DEFAULT_CLOSED_S if users else DEFAULT_OPEN_S
    promises = tuple(parse_promise(text) for text in parsed.slos)
    for promise in promises:
        if promise.percent is not None:
            raise BenchError(f"--slo {promise}: goodput is of single requests; write {promise.measure}=…")
    return BenchPlan(
        servers=_servers(parsed.urls or [DEFAULT_URL]),
        model=parsed.model,
        api_key=parsed.api_key or os.environ.get(KEY_VARIABLE),
        workload=read_workload(parsed),
        max_turns=parsed.turns,
        output_tokens=None if parsed.output_tokens is None else parsed.output_tokens.high,
        jsonl=parsed.jsonl,
        sharegpt=parsed.sharegpt,
        trace=parsed.trace,
        time_unit=parsed.time_unit,
        speed=parsed.speed,
        users=users,
        rates=rates,
        process=parsed.arrivals,
        burstiness=parsed.burstiness or 1.0,
        max_concurrency=parsed.max_concurrency,
        num_requests=parsed.requests,
        duration_s=duration_s,
        num_warmup=parsed.warmup,
        fields=_extra_body(parsed.extra_body),
        seed=parsed.seed,
        promises=promises,
        timeout_s=positive_time("--timeout", parsed.timeout),
        stall_s=positive_time("--stall-timeout", parsed.stall_timeout),
        max_failure_share=parsed.max_failure_share,
        json=parsed.json,
        html=parsed.html,
        verbose=parsed.verbose,
    )


def _levels(parsed: argparse.Namespace, duration_s: float | None) -> tuple[tuple[int, ...], tuple[Rate, ...]]:
    if parsed.rate is not None:
        return (), tuple(parse_rate(text.strip(), duration_s) for text in parsed.rate.split(","))
    if parsed.trace is not None:
        return (), ()
    if parsed.concurrency is None:
        return DEFAULT_USERS, ()
    try:
        users = tuple(int(text) for text in parsed.concurrency.split(","))
    except ValueError:
        users = ()
    if not users or min(users) < 1:
        raise BenchError(f"--concurrency is {parsed.concurrency!r}; it must be numbers of users, such as 8 or 1,4,16")
    return users, ()


def _servers(urls: list[str]) -> tuple[Server, ...]:
    servers = []
    for text in urls:
        named = re.fullmatch(r"([^=/:]+)=(\w+://.*)", text)
        url = (named[2] if named else text).rstrip("/").removesuffix("/v1")
        servers.append(Server(name=named[1] if named else url.partition("://")[2], url=url))
    names = [server.name for server in servers]
    if len(set(names)) < len(names):
        raise BenchError(f"two servers are called {max(names, key=names.count)}; name them: --url a=http://…")
    return tuple(servers)


def read_workload(parsed: argparse.Namespace) -> Workload:
    """What made-up texts are like. Raises BenchError."""
    kind = parsed.workload or "random"
    api: Api = parsed.api
    if kind == "multi-turn" and api != "chat":
        raise BenchError("multi-turn needs --api chat: a completion has no turns")
    short = Range(low=64, high=64)
    return Workload(
        input_tokens=parsed.input_tokens or (short if kind == "shared-prefix" else Range(low=256, high=256)),
        output_tokens=parsed.output_tokens or short,
        api=api,
        prefix_tokens=parsed.prefix_tokens if kind == "shared-prefix" else 0,
        num_prefixes=parsed.prefixes,
        turns=parsed.turns if kind == "multi-turn" else 1,
        turn_tokens=parsed.input_tokens or short,
        think_s=parse_seconds(parsed.think_time),
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    """Raises BenchError."""
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BenchError(f"--extra-body is {text}; it must be a JSON object")
    if ours := sorted(_OUR_FIELDS & fields.keys()):
        raise BenchError(f"--extra-body sets {', '.join(ours)}, which the load decides")
    return fields


def positive_time(flag: str, text: str) -> float:
    """Seconds. Raises BenchError."""
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise BenchError(f"{flag} is {text}; it must be positive")
    return seconds


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _range(text: str) -> Range:
    low, dash, high = text.partition("-")
    bounds = Range(low=int(low), high=int(high if dash else low))
    if not 1 <= bounds.low <= bounds.high:
        raise argparse.ArgumentTypeError(f"{text} is no range of positive numbers")
    return bounds
