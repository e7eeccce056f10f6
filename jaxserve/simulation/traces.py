"""Owns what traffic looks like: traces read from files and synthetic arrivals; knows neither engine nor clock."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from jaxserve.errors import ConfigError

ArrivalProcess = Literal["poisson", "gamma", "constant"]
ARRIVAL_PROCESSES: tuple[ArrivalProcess, ...] = get_args(ArrivalProcess)


class TracedRequest(BaseModel):
    """One request of a trace: when it comes, its prompt and its output.

    Attributes:
      arrival_s: seconds after the trace begins.
      prompt_tokens, output_tokens: their lengths, where the tokens do not matter: no other request has the same ones.
      prompt_token_ids, output_token_ids: the tokens, where they do: the next turn of a chat begins with both.
      tenant, priority, cache_salt, deadline_ms: see `SamplingParams`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    arrival_s: Annotated[float, Field(ge=0)]
    prompt_tokens: PositiveInt | None = None
    prompt_token_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    output_tokens: PositiveInt | None = None
    output_token_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    tenant: str = ""
    priority: int = 0
    cache_salt: str | None = None
    deadline_ms: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_one_of_each(self) -> Self:
        if (self.prompt_tokens is None) == (self.prompt_token_ids is None):
            raise ValueError("give either prompt_tokens or prompt_token_ids")
        if (self.output_tokens is None) == (self.output_token_ids is None):
            raise ValueError("give either output_tokens or output_token_ids")
        return self

    @property
    def prompt_length(self) -> int:
        return self.prompt_tokens or len(self.prompt_token_ids or ())

    @property
    def output_length(self) -> int:
        return self.output_tokens or len(self.output_token_ids or ())


def read_trace(path: Path) -> list[TracedRequest]:
    """A file with one request a line, as JSON, in any order.

    Raises:
      ConfigError: names the line and the field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the trace {path}: {reason}") from None
    trace = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            trace.append(TracedRequest.model_validate_json(line))
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            place = ".".join(map(str, detail["loc"]))
            message = detail["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{path}, line {number}: {place + ': ' if place else ''}{message}") from None
    if not trace:
        raise ConfigError(f"the trace {path} holds no request")
    return sorted(trace, key=lambda request: request.arrival_s)


def write_trace(path: Path, trace: Sequence[TracedRequest]) -> None:
    lines = [request.model_dump_json(exclude_defaults=True) for request in trace]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def arrival_times(process: ArrivalProcess, rate: float, count: int, *, seed: int, cv: float = 1.0) -> list[float]:
    """Seconds at which `count` requests arrive; the first one waits for its own gap, too.

    Args:
      process: of the gaps. "poisson": exponential; "gamma": more (cv > 1) or less (cv < 1) bursty than that, as Orca's
        and vLLM's successors test it; "constant": all alike.
      rate: requests per second, in the mean.
      cv: the gamma gaps' coefficient of variation, standard deviation over mean.
    """
    rng = np.random.default_rng(seed)
    if process == "constant":
        gaps = np.full(count, 1.0 / rate)
    elif process == "poisson":
        gaps = rng.exponential(1.0 / rate, count)
    else:
        shape = 1.0 / cv**2
        gaps = rng.gamma(shape, 1.0 / (rate * shape), count)
    return np.cumsum(gaps).tolist()


def synthetic_trace(
    arrivals: Sequence[float], prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], *, seed: int
) -> list[TracedRequest]:
    """Requests of random lengths, drawn evenly from `(lowest, highest)`, both included."""
    rng = np.random.default_rng([seed, 1])  # not the stream that drew the arrivals
    prompts = rng.integers(prompt_tokens[0], prompt_tokens[1] + 1, len(arrivals)).tolist()
    outputs = rng.integers(output_tokens[0], output_tokens[1] + 1, len(arrivals)).tolist()
    return [
        TracedRequest(arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)
        for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]
