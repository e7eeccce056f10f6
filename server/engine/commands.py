"""What the event loop asks of the engine's thread, between two steps; knows neither queue nor thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.engine import Engine
from jaxserve.errors import DeadlineError, InvalidRequestError, JaxserveError, QueueFullError
from jaxserve.pooling import Pooling
from jaxserve.request import SamplingParams
from jaxserve.request_limits import RequestLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prompt for the engine, and `params.n` sequences that go on from it."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    pooling: Pooling | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """Args: request_ids: of each of the job's sequences."""

    request_ids: Sequence[str]
    job: Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Work that only the engine's thread may do. `reply` takes what it returns, on that thread."""

    work: Callable[[Engine], Any]
    reply: Callable[[Any], None]


Command = Add | Abort | Call


def apply(engine: Engine, commands: Sequence[Command]) -> list[tuple[str, JaxserveError]]:
    """Does what was asked, in order; returns the requests that the engine refused, and why."""
    refused: list[tuple[str, JaxserveError]] = []
    for command in commands:
        match command:
            case Abort():
                engine.abort(command.request_id)
            case Call():
                command.reply(command.work(engine))
            case Add():
                try:
                    job = command.job
                    engine.queue(command.request_ids, job.prompt_token_ids, job.params, pooling=job.pooling)
                except (InvalidRequestError, QueueFullError, DeadlineError) as error:
                    # What could be checked on the loop's side was; the request still gets its one reply.
                    refused += [(request_id, error) for request_id in command.request_ids]
    return refused


def validate(limits: RequestLimits, jobs: Sequence[Job]) -> None:
    """Raises InvalidRequestError if one of the jobs could never be served; parameters that they share are read once."""
    params: SamplingParams | None = None
    for job in jobs:
        if job.params is not params:
            params = job.params
            limits.check_params(params)
        limits.check_prompt(job.prompt_token_ids, params)


def coming(commands: Sequence[Command]) -> list[tuple[int, str]]:
    """Length and tenant of each sequence that is on its way into the engine's queue."""
    return [
        (len(command.job.prompt_token_ids), command.job.params.tenant)
        for command in commands
        if isinstance(command, Add)
        for _ in command.request_ids
    ]


def checked_pages(engine: Engine) -> Mapping[str, Any]:
    """The engine's counts, its page ledger, and what was found where they do not agree with each other."""
    fault = None
    try:
        engine.check_integrity()
    except AssertionError as error:
        fault = str(error)  # told here: raised, it would end the engine's thread
    ledger = engine.page_ledger()
    return {"fault": fault, **asdict(engine.stats()), "ledger": {**asdict(ledger), "waste": ledger.waste}}
