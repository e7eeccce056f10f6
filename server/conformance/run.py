"""Runs the cases one after the other and tells what held."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import httpx
from rich.console import Console
from rich.table import Table

from jaxserve.errors import ConfigError
from server.conformance import chat, counting, life, parameters, security, streams, text
from server.conformance.case import Case, FailedError, SkippedError
from server.conformance.client import Server

CASES: tuple[Case, ...] = tuple(
    case for module in (text, streams, parameters, chat, counting, life, security) for case in module.CASES
)
KINDS = tuple(dict.fromkeys(case.kind for case in CASES))

Outcome = Literal["passed", "failed", "skipped"]
_MARKS: Mapping[Outcome, str] = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "skipped": "[yellow]–[/]"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One case's outcome.

    Attributes:
      reason: what the server did instead, or what it lacks; empty where the claim held.
    """

    case: Case
    outcome: Outcome
    reason: str
    seconds: float


async def run_cases(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    kinds: Sequence[str] = KINDS,
    timeout_s: float = 60.0,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Every case of these kinds against the server at `url`.

    Args:
      model: the id to ask for; None: the first that the server lists.
      report: called with each result as it is there.

    Raises:
      ConfigError: no server answers at `url`, or it lists no model.
    """
    server = Server(url, model=model or "", api_key=api_key, timeout_s=timeout_s)
    async with server.http:
        if model is None:
            server.model = await _first_model(server)
        results = []
        for case in CASES:
            if case.kind in kinds:
                results.append(await _run(case, server))
                report(results[-1])
    return results


async def _first_model(server: Server) -> str:
    try:
        reply = await server.http.get("/v1/models")
        model: str = reply.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{server.url}/v1/models names no model ({error!r}); give --model, or check --url") from None
    return model


async def _run(case: Case, server: Server) -> Result:
    outcome: Outcome = "passed"
    reason = ""
    start = time.perf_counter()
    try:
        await case.run(server)
    except FailedError as error:
        outcome, reason = "failed", str(error)
    except SkippedError as error:
        outcome, reason = "skipped", str(error)
    except httpx.HTTPError as error:
        outcome, reason = "failed", f"the connection failed: {error!r}"
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, TimeoutError) as error:
        outcome, reason = "failed", f"the answer has not the documented shape, or never came: {error!r}"
    return Result(case=case, outcome=outcome, reason=reason, seconds=time.perf_counter() - start)


def print_results(results: Sequence[Result], console: Console, *, verbose: bool = False) -> None:
    """Everything that did not hold, by kind, and the counts; with `verbose`, what held too."""
    for kind in KINDS:
        told = [r for r in results if r.case.kind == kind and (verbose or r.outcome != "passed")]
        if told:
            console.print(f"\n[bold]{kind}[/]")
        for result in told:
            console.print(f"  {_MARKS[result.outcome]} {result.case.claim}", highlight=False)
            if result.reason:
                console.print(f"      {result.reason}", style="dim", highlight=False, markup=False)
    table = Table("kind", "passed", "failed", "skipped")
    for kind in KINDS:
        counts = Counter(result.outcome for result in results if result.case.kind == kind)
        if counts:
            table.add_row(kind, *(str(counts[outcome]) for outcome in _MARKS))
    totals = Counter(result.outcome for result in results)
    table.add_row("all", *(str(totals[outcome]) for outcome in _MARKS), style="bold")
    console.print(table)
