"""The bodies of OpenAI's completions and chat completions, as this server reads them; what it cannot do, it refuses.

Fields keep OpenAI's names, and vLLM's where OpenAI has none. Ranges that offline and HTTP share are checked once, in
`SamplingParams`; here stand types, and limits that only these routes have.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from jaxserve.errors import InvalidRequestError
from jaxserve.request import INT32_MAX, MAX_LOGPROBS, SamplingParams
from jaxserve.text.chat import RESERVED_NAMES
from server.json_body import parse_json

MAX_CHOICES = 4096  # prompts times n, of one request
MAX_QUOTED = 80  # characters of a wrong value that an error repeats
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, where a completion names no max_tokens

Prompt = str | tuple[int, ...]

BodyT = TypeVar("BodyT", bound="SamplingBody")


def parse_body(schema: type[BodyT], body: bytes) -> BodyT:
    """Reads one request; raises InvalidRequestError that names the first field at fault."""
    fields = parse_json(body)
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the body is a JSON {type(fields).__name__}; it must be an object")
    for name in [name for name in fields if name in schema.no_ops]:
        no_op = schema.no_ops[name]
        value = fields.pop(name)
        if value is not None and not no_op.accepts(value):
            raise InvalidRequestError(f"{name} is {_shorten(value)}: {no_op.why}", param=name)
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _to_invalid_request(schema, error) from None


# --- pieces of a body ---


class Strict(BaseModel):
    """JSON types are taken at their word: no "1" for 1, no 1.0 for 1, no true for 1; unknown keys are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either becomes a tuple of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("not empty")
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        if isinstance(item, list) and all(type(token_id) is int for token_id in item):
            prompts.append(tuple(item))
        elif isinstance(item, str):
            prompts.append(item)
        else:
            raise ValueError(f"made of strings or of lists of token ids; item {index} is {_shorten(item)}")
        if not item:
            raise ValueError(f"made of prompts that are not empty; item {index} is empty")
    return tuple(prompts)


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("a string or a list of strings")


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise ValueError("a list of token ids")


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("a list of strings")


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("a mapping of token id to bias")
    biases = {}
    for key, bias in value.items():
        if not key.removeprefix("-").isdecimal() or not key.isascii():
            raise ValueError(f"a mapping of token id to bias; {_shorten(key)} is no token id")
        if type(bias) not in (int, float):
            raise ValueError(f"a mapping of token id to bias; the bias of {key} is {_shorten(bias)}")
        biases[int(key)] = float(bias)
    return biases


def _content(value: Any) -> str | None:
    """Text as it is; a list of text parts joined by line breaks, as most templates know strings only."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"text: part {index} has type {_shorten(kind)}, and this server takes text only")
        text = part.get("text")
        if part.keys() != {"type", "text"} or not isinstance(text, str):
            raise ValueError(f'text: part {index} must be {{"type": "text", "text": a string}}')
        texts.append(text)
    return "\n".join(texts)


TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids)]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    # OpenAI pads its chunks to hide their length unless told not to; this server never does.
    include_obfuscation: Literal[False] | None = None


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One turn of a conversation. Fields that OpenAI's own replies carry as null are taken as null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_content)] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"complete: a message of role {self.role!r} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"consistent: only an assistant calls tools, this message has role {self.role!r}")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it; absent and null fields are absent."""
        return self.model_dump(exclude_none=True, exclude={"annotations"})


# --- parameters of OpenAI that this server does not implement ---


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOp:
    """A known parameter of which only values that change nothing are taken; null always is one."""

    accepts: Callable[[Any], bool]
    why: str


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_USER = NoOp(accepts=_is_text, why="it must be a string; it labels the caller and never changes an answer")

_CHAT_NO_OPS = {
    # Labels for OpenAI's own bookkeeping: they never change an answer, so any well-typed value is a no-op.
    "user": _USER,
    "safety_identifier": _USER,
    "metadata": NoOp(
        accepts=lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
        why="it must map strings to strings; it labels stored completions, and this server stores none",
    ),
    # Hints about where to cache; prefixes are shared without being asked.
    "prompt_cache_key": NoOp(accepts=_is_text, why="it must be a string; it is only a hint"),
    "prompt_cache_retention": NoOp(accepts=_only("in_memory"), why="prefixes are cached in memory only"),
    "prompt_cache_options": NoOp(accepts=_only({}), why="the prefix cache has no options per request"),
    # One tier, nothing kept.
    "service_tier": NoOp(accepts=_only("auto", "default"), why="there is one tier; leave it at auto or default"),
    "store": NoOp(accepts=_only(False), why="this server stores no completions"),
    # Tools: without any, "auto" and "none" both mean a plain answer.
    "tools": NoOp(accepts=_only([]), why="tool calls are not supported"),
    "tool_choice": NoOp(accepts=_only("none", "auto"), why="tool calls are not supported"),
    "parallel_tool_calls": NoOp(accepts=_only(True, False), why="it must be a boolean, and matters only with tools"),
    "functions": NoOp(accepts=_only([]), why="function calls are not supported"),
    "function_call": NoOp(accepts=_only("none", "auto"), why="function calls are not supported"),
    # The shape and manner of the answer: only what the model gives anyway.
    "response_format": NoOp(accepts=_only({"type": "text"}), why='only {"type": "text"} is supported'),
    "modalities": NoOp(accepts=_only(["text"]), why="this server answers in text only"),
    "audio": NoOp(accepts=_only(), why="this server answers in text only"),
    "verbosity": NoOp(accepts=_only("medium"), why="models served here know no verbosity; ask for it in a message"),
    "reasoning_effort": NoOp(
        accepts=_only(), why="it is not supported; templates that know such a switch take it in chat_template_kwargs"
    ),
    "prediction": NoOp(accepts=_only(), why="predicted outputs are not supported"),
    "moderation": NoOp(accepts=_only(), why="this server does not moderate"),
    "web_search_options": NoOp(accepts=_only(), why="this server does not search the web"),
}

_COMPLETION_NO_OPS = {
    "user": _USER,
    "suffix": NoOp(accepts=_only(""), why="text after the completion is not supported"),
    # The best 1 of 1 is every completion; of more, it would have to be ranked.
    "best_of": NoOp(accepts=_only(1), why="choosing the best of several is not supported; use n"),
}


# --- the bodies ---


class SamplingBody(Strict):
    """What both routes share; null stands for a default everywhere."""

    no_ops: ClassVar[Mapping[str, NoOp]]

    model: str
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options are given, but stream is not true", param="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _shared_params(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SHARED_PARAMS}
        return {name: value for name, value in values.items() if value is not None}


# The fields that SamplingParams has under the same name and with the same meaning.
_SHARED_PARAMS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingBody.model_fields and field.name != "logprobs"
)


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    no_ops = _COMPLETION_NO_OPS

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for values out of range."""
        values = self._shared_params()
        values.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
        values["logprobs"] = self.logprobs
        if self.echo and self.logprobs is not None:
            # The echoed prompt has logprobs too; a request for more alternatives than that stands.
            values["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        params = SamplingParams(**values)
        if len(self.prompt) * params.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(self.prompt)} prompts times n = {params.n} are more than {MAX_CHOICES} choices", param="prompt"
            )
        return params


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    no_ops = _CHAT_NO_OPS

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs is given, but logprobs is not true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; give one",
                param="max_tokens",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message continues the last message, add_generation_prompt opens a new one; give one",
                param="continue_final_message",
            )
        reserved = RESERVED_NAMES.intersection(self.chat_template_kwargs or ())
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {min(reserved)}; the request itself does",
                param="chat_template_kwargs",
            )
        return self

    @property
    def opens_new_message(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for values out of range."""
        values = self._shared_params()
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**values)


# --- what pydantic found, in one sentence ---


def _to_invalid_request(schema: type[SamplingBody], error: ValidationError) -> InvalidRequestError:
    # An unknown name is the likeliest slip and may explain the rest, so it goes first.
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    detail = details[0]
    param = _param(detail["loc"])
    if detail["type"] == "missing":
        return InvalidRequestError(f"{param} is missing", param=param, code="missing_parameter")
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(param, [*schema.model_fields, *schema.no_ops], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return InvalidRequestError(f"unknown parameter {param}{hint}", param=param, code="unknown_parameter")
    if detail["type"] == "too_short":
        return InvalidRequestError(f"{param} is empty", param=param)
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be ", "", 1)
    return InvalidRequestError(f"{param} is {_shorten(detail['input'])}; it must be {message}", param=param)


def _param(location: Sequence[int | str]) -> str:
    """`("messages", 2, "role")` becomes `messages[2].role`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _shorten(value: Any) -> str:
    cut = value[:MAX_QUOTED] if isinstance(value, str | list) else value  # a wrong value may be megabytes long
    text = json.dumps(cut, ensure_ascii=False)
    return text if cut == value and len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"
