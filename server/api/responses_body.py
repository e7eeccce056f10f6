"""The body of OpenAI's responses route, and its input items as the messages of a conversation."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from jaxserve.errors import InvalidRequestError
from jaxserve.request import INT32_MAX, MAX_LOGPROBS, SamplingParams
from server.api.body import USER, ModelBody, NoOp, Strict, is_text, only, shorten
from server.api.conversation import CalledFunction, FunctionDefinition, Message, ToolCall

LOGPROBS = "message.output_text.logprobs"

Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict):
    """A text of an item. Our own output texts come back with annotations and logprobs, which say nothing to a model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


def _content(value: Any) -> str:
    """A text as it is; text parts joined by line breaks, as most templates know strings only."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text"):
            raise ValueError(f"text: part {index} has type {shorten(kind)}, and this server takes text only")
        texts.append(InputPart.model_validate(part).text)
    return "\n".join(texts)


Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[InputPart])]


class InputMessage(Strict):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: None = None


class FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status | None = None


Item = Annotated[InputMessage | FunctionCall | FunctionCallOutput, Field(discriminator="type")]


class Tool(Strict):
    """A function, which here is not nested as in chat completions."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None

    def for_template(self) -> dict[str, Any]:
        function = FunctionDefinition(name=self.name, description=self.description, parameters=self.parameters)
        return {"type": "function", "function": function.model_dump(exclude_none=True)}


class TextFormat(Strict):
    type: Literal["text"]


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponseBody(ModelBody):
    """POST /v1/responses."""

    no_ops = {  # noqa: RUF012 - a ClassVar of the base
        "user": USER,
        "safety_identifier": USER,
        "prompt_cache_key": NoOp(accepts=is_text, why="it must be a string; it is only a hint"),
        "prompt_cache_retention": NoOp(accepts=only("in_memory"), why="prefixes are cached in memory only"),
        "prompt_cache_options": NoOp(accepts=only({}), why="the prefix cache has no options per request"),
        "service_tier": NoOp(accepts=only("auto", "default"), why="there is one tier; leave it at auto or default"),
        "background": NoOp(accepts=only(False), why="background responses are not supported; stream, or wait"),
        "background_options": NoOp(accepts=only(), why="background responses are not supported"),
        "truncation": NoOp(accepts=only("disabled"), why="a conversation that is too long is refused, never cut"),
        "conversation": NoOp(accepts=only(), why="conversations are not supported; use previous_response_id"),
        "context_management": NoOp(accepts=only([]), why="conversations are not compacted"),
        "prompt": NoOp(accepts=only(), why="this server stores no prompt templates"),
        "reasoning": NoOp(accepts=only({}), why="reasoning is not told apart from text"),
        "max_tool_calls": NoOp(accepts=only(), why="it bounds built-in tools, of which there are none"),
        "moderation": NoOp(accepts=only(), why="this server does not moderate"),
        "access_programs": NoOp(accepts=only(), why="this server has none"),
        "image": NoOp(accepts=only(), why="this server makes no images"),
    }

    model: str
    input: str | list[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextConfig | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _messages_may_omit_their_type(cls, fields: Any) -> Any:
        items = fields.get("input") if isinstance(fields, dict) else None
        if not isinstance(items, list):
            return fields
        typed = [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in items]
        return {**fields, "input": typed}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise InvalidRequestError(
                f"top_logprobs is given, but include does not hold {LOGPROBS!r}", param="top_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options are given, but stream is not true", param="stream_options")
        if self.tools and self.parallel_tool_calls is False:
            raise InvalidRequestError(
                "parallel_tool_calls is false, but how many tools the model calls cannot be bounded",
                param="parallel_tool_calls",
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.include)

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for values out of range."""
        values = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "top_p": self.top_p}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if self.wants_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**given)

    def messages(self) -> list[Message]:
        """What this request adds to the conversation; its instructions are not part of that."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return _as_messages(self.input)

    def shown_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.for_template() for tool in self.tools]


def _as_messages(items: Sequence[InputMessage | FunctionCall | FunctionCallOutput]) -> list[Message]:
    """Calls that follow each other, or the assistant's text, belong to one message of the assistant."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            messages.append(Message(role=item.role, content=item.content))
        elif isinstance(item, FunctionCallOutput):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
        else:
            call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
            if not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant"))
            calls = messages[-1].tool_calls
            if calls is None:
                calls = []
                messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
            calls.append(call)
    return messages
