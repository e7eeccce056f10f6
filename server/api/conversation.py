"""A conversation as OpenAI's chat bodies carry it: messages, their parts, tool calls, tool definitions, template."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import RESERVED_NAMES
from server.api.body import ModelBody, Strict, shorten

MAX_TEMPLATE_CHARS = 2**16  # of a template that comes with a request; the longest published ones have a fifth of that


class TextPart(Strict):
    type: Literal["text"]
    text: str


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
            raise ValueError(f"text: part {index} has type {shorten(kind)}, and this server takes text only")
        text = part.get("text")
        if part.keys() != {"type", "text"} or not isinstance(text, str):
            raise ValueError(f'text: part {index} must be {{"type": "text", "text": a string}}')
        texts.append(text)
    return "\n".join(texts)


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
    content: Annotated[str | None, PlainValidator(_content, json_schema_input_type=str | list[TextPart] | None)] = None
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


class FunctionDefinition(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # arguments that must fit their schema need constrained decoding


class ToolDefinition(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class ConversationBody(ModelBody):
    """What every route shares that renders a conversation through the model's chat template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto"] | None = None  # a forced call needs constrained decoding
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _conversation_is_consistent(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message continues the last message, add_generation_prompt opens a new one; give one",
                param="continue_final_message",
            )
        if self.tools and self.parallel_tool_calls is False:
            raise InvalidRequestError(
                "parallel_tool_calls is false, but how many tools the model calls cannot be bounded",
                param="parallel_tool_calls",
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

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is told of: none where it may not call any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]
