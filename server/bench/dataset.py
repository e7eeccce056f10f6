"""Reads requests from files, JSON lines or ShareGPT's form; every complaint names the file and the line.

A line of a JSONL file is a body of OpenAI's API (`prompt` or `messages`, and any of its other fields), sent as it is.
Three fields are ours: `timestamp` makes the file a trace, `input_length` in place of a prompt asks for a random one,
and `output_length` is `max_tokens` by the name that traces have for it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from server.bench.errors import BenchError
from server.bench.load import Conversation
from server.bench.workload import Api, TokenLength, sized_conversation

Length = Annotated[int, Field(ge=1)]
SchemaT = TypeVar("SchemaT", bound=BaseModel)
TimeUnit = Literal["s", "ms"]
_USERS, _MODELS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


def _names(ours: str, simulators: str) -> AliasChoices:
    """The simulator's traces can be replayed against a server, too."""
    return AliasChoices(ours, simulators)


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str


class _Line(BaseModel):
    """One line of a JSONL file; fields that are not named here go to the server as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    timestamp: float | None = Field(None, ge=0, allow_inf_nan=False, validation_alias=_names("timestamp", "arrival_s"))
    prompt: str | list[int] | None = Field(None, validation_alias=_names("prompt", "prompt_token_ids"))
    messages: list[_Message] | None = None
    input_length: Length | None = Field(None, validation_alias=_names("input_length", "prompt_tokens"))
    output_length: Length | None = Field(None, validation_alias=_names("output_length", "output_tokens"))
    max_tokens: Length | None = None
    n: Literal[1] = 1

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "_Line":
        given = [name for name in ("prompt", "messages", "input_length") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"one of prompt, messages and input_length is needed, not {' and '.join(given) or 'none'}")
        return self


class _Utterance(BaseModel):
    speaker: str = Field(alias="from")
    value: str


class _Shared(BaseModel):
    conversations: list[_Utterance]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Attributes:
    arrivals: seconds after the first line's timestamp, ascending; None where lines have none.
    """

    conversations: tuple[Conversation, ...]
    arrivals: tuple[float, ...] | None = None


def read_jsonl(
    path: Path,
    *,
    api: Api,
    length: TokenLength,
    default_output_tokens: int,
    time_unit: TimeUnit = "s",
    speed: float = 1.0,
) -> Dataset:
    """Reads a file of requests, or a trace if its lines have timestamps. Raises BenchError.

    Args:
      default_output_tokens: `max_tokens` of a line that has neither it nor an `output_length`.
      speed: 2 replays a trace in half its time.
    """
    conversations: list[Conversation] = []
    times: list[float] = []
    for number, raw in _lines(path):
        line = _validated(_Line, _parsed(raw, path, number), path, number)
        max_tokens = line.output_length or line.max_tokens or default_output_tokens
        if line.input_length is not None:
            conversation = sized_conversation(line.input_length, max_tokens, length, api, seed=number)
        else:
            ours = {"timestamp", "output_length", "n", "max_tokens"}
            body = line.model_dump(exclude=ours, exclude_unset=True)
            if "max_completion_tokens" not in body:
                body["max_tokens"] = max_tokens
            conversation = Conversation(turns=(body,))
        if conversations and (line.timestamp is None) == bool(times):
            has = "no timestamp" if line.timestamp is None else "a timestamp"
            raise BenchError(f"{path}, line {number} has {has}, unlike the lines before it")
        conversations.append(conversation)
        if line.timestamp is not None:
            if times and line.timestamp < times[-1]:
                raise BenchError(f"{path}, line {number}: timestamp {line.timestamp:g} is before the line above it")
            times.append(line.timestamp)
    if not conversations:
        raise BenchError(f"{path} has no request")
    scale = (1e-3 if time_unit == "ms" else 1.0) / speed
    return Dataset(
        conversations=tuple(conversations),
        arrivals=tuple((time - times[0]) * scale for time in times) if times else None,
    )


def read_sharegpt(path: Path, *, max_turns: int, think_s: float, default_output_tokens: int | None) -> Dataset:
    """Reads ShareGPT's JSON array (or the same, one object a line). Raises BenchError.

    The users' side is sent, turn by turn; the replies are the server's own. A reply may be as long as the recorded one
    (four tokens for three of its words) unless `default_output_tokens` says otherwise. Conversations that do not begin
    with a user's turn and a reply are left out.
    """
    conversations = []
    for number, entry in _entries(path):
        shared = _validated(_Shared, entry, path, number)
        turns: list[dict[str, Any]] = []
        talk = shared.conversations
        for asked, replied in zip(talk[::2], talk[1::2], strict=False):
            if (
                asked.speaker not in _USERS
                or replied.speaker not in _MODELS
                or not asked.value
                or len(turns) == max_turns
            ):
                break
            written = default_output_tokens or max(1, len(replied.value.split()) * 4 // 3)
            turns.append({"messages": [{"role": "user", "content": asked.value}], "max_tokens": written})
        if turns:
            conversations.append(Conversation(turns=tuple(turns), think_s=think_s))
    if not conversations:
        raise BenchError(f"{path} has no conversation that begins with a user's turn and a reply")
    return Dataset(conversations=tuple(conversations))


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """Objects of a JSON array with the line each begins in, or of JSON lines."""
    text = _read(path)
    if not text.lstrip().startswith("["):
        for number, raw in _lines(path):
            yield number, _parsed(raw, path, number)
        return
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    line, counted = 1, 0
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        line, counted = line + text.count("\n", counted, position), position
        if position >= len(text):
            raise BenchError(f"{path}, line {line}: the array is not closed")
        if text[position] == "]":
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise BenchError(f"{path}, line {error.lineno}: {error.msg}") from None
        yield line, entry


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(_read(path).split("\n"), 1):
        if raw.strip():
            yield number, raw


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BenchError(f"{path}, line {line} is not UTF-8: {error.reason}") from None
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from None


def _parsed(raw: str, path: Path, number: int) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise BenchError(f"{path}, line {number} is not JSON: {error}") from None


def _validated(schema: type[SchemaT], value: Any, path: Path, number: int) -> SchemaT:
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        raise BenchError(f"{path}, line {number}: {where + ': ' if where else ''}{message}") from None
