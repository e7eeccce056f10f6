"""The bodies of Anthropic's messages routes, and their blocks as the messages of a conversation."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxserve.request import INT32_MAX, SamplingParams
from server.api.body import ModelBody, NoOp, Strict, only
from server.api.conversation import CalledFunction, FunctionDefinition, Message, ToolCall


class CacheControl(Strict):
    """A hint where to cache; prefixes are shared without being asked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolUse(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResult(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Literal[False] | None = None  # chat templates have no place for it; the content can tell
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ToolUse | ToolResult, Field(discriminator="type")]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant"]
    content: str | list[Block]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "AnthropicMessage":
        wrong = ToolResult if self.role == "assistant" else ToolUse
        if not isinstance(self.content, str) and any(isinstance(block, wrong) for block in self.content):
            raise ValueError(f"consistent: role {self.role!r} has no blocks of that type")
        return self

    def as_messages(self) -> list[Message]:
        """Results of tools are messages of their own, before the text that comes with them."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if self.role == "user":
            results = [
                Message(role="tool", tool_call_id=block.tool_use_id, content=_joined(block.content or ""))
                for block in self.content
                if isinstance(block, ToolResult)
            ]
            return [*results, *([Message(role="user", content=_joined(texts))] if texts or not results else ())]
        calls = [
            ToolCall(
                id=block.id,
                function=CalledFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)),
            )
            for block in self.content
            if isinstance(block, ToolUse)
        ]
        return [Message(role="assistant", content=_joined(texts), tool_calls=calls or None)]


class AnthropicTool(Strict):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: Literal[False] | None = None

    def for_template(self) -> dict[str, Any]:
        function = FunctionDefinition(name=self.name, description=self.description, parameters=self.input_schema)
        return {"type": "function", "function": function.model_dump(exclude_none=True)}


class ToolChoice(Strict):
    """A forced call, or one at most, needs constrained decoding."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] | None = None


_NO_OPS = {
    "thinking": NoOp(accepts=only({"type": "disabled"}), why="thinking is not told apart from text"),
    "cache_control": NoOp(
        accepts=lambda value: isinstance(value, dict) and value.get("type") == "ephemeral",
        why='it must be {"type": "ephemeral"}; it is only a hint',
    ),
    "output_config": NoOp(accepts=only({}), why="the form of the answer cannot be chosen"),
    "speed": NoOp(accepts=only("standard"), why="there is one speed"),
}
_CREATE_NO_OPS = _NO_OPS | {
    "metadata": NoOp(
        accepts=lambda value: isinstance(value, dict) and value.keys() <= {"user_id"},
        why="it may hold a user_id, which labels the caller and never changes an answer",
    ),
    "service_tier": NoOp(accepts=only("auto", "standard_only"), why="there is one tier"),
    "container": NoOp(accepts=only(), why="this server runs no code"),
    "inference_geo": NoOp(accepts=only(), why="this server is where it is"),
    "diagnostics": NoOp(accepts=only(), why="this server has none"),
}


class CountTokensBody(ModelBody):
    """POST /v1/messages/count_tokens: what decides the prompt."""

    no_ops = _NO_OPS

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None

    def conversation(self) -> list[Message]:
        system = [] if self.system is None else [Message(role="system", content=_joined(self.system))]
        return [*system, *(message for turn in self.messages for message in turn.as_messages())]

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message, which is the assistant's own."""
        return self.messages[-1].role == "assistant"

    def shown_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or (self.tool_choice is not None and self.tool_choice.type == "none"):
            return None
        return [tool.for_template() for tool in self.tools]


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    no_ops = _CREATE_NO_OPS

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError for values out of range."""
        values: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(max_tokens=self.max_tokens, stop=tuple(self.stop_sequences or ()), **given)


def _joined(content: str | Sequence[TextBlock]) -> str:
    """Text as it is; blocks joined by line breaks, as most templates know strings only."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
