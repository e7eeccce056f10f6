"""The bodies of OpenAI's completions and chat completions, as this server reads them; what it cannot do, it refuses.

Fields keep OpenAI's names, and vLLM's where OpenAI has none. Ranges that offline and HTTP share are checked once, in
`SamplingParams`; here stand types, and limits that only these routes have.
"""

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from jaxserve.errors import InvalidRequestError
from jaxserve.request import INT32_MAX, MAX_LOGPROBS, MAX_NAME_CHARS, SamplingParams
from server.api.body import USER, ModelBody, NoOp, Strict, Strings, TokenIds, is_text, only, shorten
from server.api.conversation import ConversationBody

MAX_CHOICES = 4096  # prompts times n, of one request
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, where a completion names no max_tokens

Prompt = str | tuple[int, ...]


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
            raise ValueError(f"made of strings or of lists of token ids; item {index} is {shorten(item)}")
        if not item:
            raise ValueError(f"made of prompts that are not empty; item {index} is empty")
    return tuple(prompts)


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("a string or a list of strings")


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("a mapping of token id to bias")
    biases = {}
    for key, bias in value.items():
        if not key.removeprefix("-").isdecimal() or not key.isascii():
            raise ValueError(f"a mapping of token id to bias; {shorten(key)} is no token id")
        if type(bias) not in (int, float):
            raise ValueError(f"a mapping of token id to bias; the bias of {key} is {shorten(bias)}")
        biases[int(key)] = float(bias)
    return biases


class StreamOptions(Strict):
    include_usage: bool | None = None
    # OpenAI pads its chunks to hide their length unless told not to; this server never does.
    include_obfuscation: Literal[False] | None = None


# --- parameters of OpenAI that this server does not implement ---


_CHAT_NO_OPS = {
    # Labels for OpenAI's own bookkeeping: they never change an answer, so any well-typed value is a no-op.
    "safety_identifier": USER,
    "metadata": NoOp(
        accepts=lambda value: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
        why="it must map strings to strings; it labels stored completions, and this server stores none",
    ),
    # Hints about where to cache; prefixes are shared without being asked.
    "prompt_cache_key": NoOp(accepts=is_text, why="it must be a string; it is only a hint"),
    "prompt_cache_retention": NoOp(accepts=only("in_memory"), why="prefixes are cached in memory only"),
    "prompt_cache_options": NoOp(accepts=only({}), why="the prefix cache has no options per request"),
    # One tier, nothing kept.
    "service_tier": NoOp(accepts=only("auto", "default"), why="there is one tier; leave it at auto or default"),
    "store": NoOp(accepts=only(False), why="this server stores no completions"),
    # The older form of tools.
    "functions": NoOp(accepts=only([]), why="function calls are not supported"),
    "function_call": NoOp(accepts=only("none", "auto"), why="function calls are not supported"),
    # The shape and manner of the answer: only what the model gives anyway.
    "response_format": NoOp(accepts=only({"type": "text"}), why='only {"type": "text"} is supported'),
    "modalities": NoOp(accepts=only(["text"]), why="this server answers in text only"),
    "audio": NoOp(accepts=only(), why="this server answers in text only"),
    "verbosity": NoOp(accepts=only("medium"), why="models served here know no verbosity; ask for it in a message"),
    "reasoning_effort": NoOp(
        accepts=only(), why="it is not supported; templates that know such a switch take it in chat_template_kwargs"
    ),
    "prediction": NoOp(accepts=only(), why="predicted outputs are not supported"),
    "moderation": NoOp(accepts=only(), why="this server does not moderate"),
    "web_search_options": NoOp(accepts=only(), why="this server does not search the web"),
}

_COMPLETION_NO_OPS = {
    "suffix": NoOp(accepts=only(""), why="text after the completion is not supported"),
    # The best 1 of 1 is every completion; of more, it would have to be ranked.
    "best_of": NoOp(accepts=only(1), why="choosing the best of several is not supported; use n"),
}


# --- the bodies ---


class SamplingBody(ModelBody):
    """What both routes share; null stands for a default everywhere."""

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
    logit_bias: (
        Annotated[dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])] | None
    ) = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Strings | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop, json_schema_input_type=str | list[str])] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    deadline_ms: int | None = None
    queue_timeout_ms: int | None = None
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
        if self.user is not None and len(self.user) > MAX_NAME_CHARS:
            raise InvalidRequestError(
                f"user has {len(self.user)} characters; the limit is {MAX_NAME_CHARS}", param="user"
            )
        values["tenant"] = self.user
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

    prompt: Prompts
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


class ChatBody(SamplingBody, ConversationBody):
    """POST /v1/chat/completions."""

    no_ops = _CHAT_NO_OPS

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs is given, but logprobs is not true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; give one",
                param="max_tokens",
            )
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for values out of range."""
        values = self._shared_params()
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**values)
