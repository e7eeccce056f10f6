"""Chat messages to prompt text through the checkpoint's jinja template; knows no tokens and no HTTP.

Follows transformers' `apply_chat_template` (5.24), and mends what there fails for no good reason: see `ChatTemplate`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from jaxserve.errors import InvalidRequestError
from jaxserve.text.sandbox import Budget, TemplateEnvironment, render_within
from jaxserve.text.tokenizer import Tokenizer

RESERVED_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self")
)  # not to be given as further keyword arguments
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_HERE = "CONTINUE THE FINAL MESSAGE HERE "  # its last space shows whether the template trims the message
MAX_RENDER_SECONDS = 5.0
_PROBE_SECONDS = 1.0

Message = Mapping[str, Any]


class ChatTemplate:
    """One chat template, compiled once. Immutable; `render` may run in several threads.

    What a template sees is what transformers shows it: message keys whose value is None are left out, the message's
    reasoning goes by each of its names, `tools` and `documents` are always defined (None without any), special tokens
    by their role, and further keyword arguments over these.

    Two things are better here:
    - Tool-call arguments come from clients as JSON text. Templates that write them as JSON themselves, or go through
      them, get them as a mapping (none at all, `""`, is an empty one). What the template wants is found out by trying.
    - Where a template fails only because a message has no content, the content is `""`; where only because a call has
      no arguments, they are `{}`.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises InvalidRequestError if the source is no valid template: chats fail then, other requests need not."""
        try:
            self._template = TemplateEnvironment(now=now).from_string(source)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise _refused(error) from error
        self._special_tokens = dict(special_tokens)
        self.wants_argument_mappings = self._probe_arguments()
        self.shows_tools = self._probe_tools()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text.

        Args:
          messages: as the OpenAI API has them, at least one; not changed.
          add_generation_prompt: ends with the header of the assistant's next message.
          continue_final_message: ends inside the last message, for the model to go on with it.
          kwargs: further variables of the template, none of `RESERVED_NAMES`.

        Raises:
          InvalidRequestError: the template refuses or fails, in its own words, or exceeds its limits.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        shown = [_normalized(index, message) for index, message in enumerate(messages)]
        if self.wants_argument_mappings:
            shown = [_with_arguments(message, _parsed_arguments) for message in shown]
        final_text = ""
        if continue_final_message:
            shown[-1], final_text = _marked(shown[-1])
        variables = {
            **self._special_tokens,
            **kwargs,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render_mended(shown, variables)
        return _cut_at_mark(text, final_text) if continue_final_message else text

    def _render_mended(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Renders; if that fails, again with what is missing filled in. The first failure is the one reported."""
        budget = Budget(seconds=MAX_RENDER_SECONDS)
        with_content = [message if "content" in message else {**message, "content": ""} for message in messages]
        with_arguments = [_with_arguments(message, _filled_arguments) for message in with_content]
        tried: list[list[dict[str, Any]]] = []
        first_error: Exception | None = None
        for attempt in (messages, with_content, with_arguments):
            if attempt in tried:
                continue
            tried.append(attempt)
            try:
                return render_within(self._template, {**variables, "messages": attempt}, budget)
            except Exception as error:  # a template is a program and may raise anything
                first_error = first_error or error
        assert first_error is not None
        raise _refused(first_error) from first_error

    def _probe_arguments(self) -> bool:
        """Whether tool-call arguments must be mappings: the JSON text fails, or comes out as another text.

        Not where the template pastes what it gets: a mapping would then come out in Python's own spelling.
        """
        texts = []
        mapping, text = {"city": "Oslo"}, '{"city": "Oslo"}'
        for arguments in (mapping, text):
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            messages: list[Message] = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "21"},
            ]
            texts.append(self._probe(messages, [_PROBE_TOOL]))
        from_mapping, from_text = texts
        is_pasted = str(mapping) in from_mapping and text in from_text
        return bool(from_mapping) and from_mapping != from_text and not is_pasted

    def _probe_tools(self) -> bool:
        """Whether the prompt is another one when there are tools."""
        messages = [{"role": "user", "content": "Weather?"}]
        return self._probe(messages, [_PROBE_TOOL]) != self._probe(messages, None)

    def _probe(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """A conversation's text; empty if the template fails on it."""
        variables = {**self._special_tokens, "tools": tools, "documents": None, "messages": messages}
        try:
            budget = Budget(seconds=_PROBE_SECONDS)
            return render_within(self._template, {**variables, "add_generation_prompt": True}, budget)
        except Exception:  # a template is a program and may raise anything
            return ""


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def pick_template(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate | None:
    """The checkpoint's template for a chat, compiled once: "tool_use" if it has one and tools are given (even none).

    Raises:
      InvalidRequestError: the checkpoint's template is no valid jinja.
    """
    templates = tokenizer.chat_templates
    source = templates.get("tool_use") if tools is not None else None
    source = source if source is not None else templates.get("default")
    return None if source is None else _compiled(source, tuple(sorted(tokenizer.special_tokens.items())))


@lru_cache(maxsize=32)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=dict(special_tokens))


def _refused(error: Exception) -> InvalidRequestError:
    words = "it nests too deep" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    return InvalidRequestError(f"the chat template refuses these messages: {words}", param="messages")


def _normalized(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"messages[{index}] is no object", param=f"messages[{index}]")
    shown = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shown[key] for key in REASONING_KEYS if key in shown), None)
    if reasoning is not None:
        shown = {"thinking": reasoning, **shown, "reasoning_content": reasoning}
    return shown


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The message with each tool call's arguments changed; anything of another shape is the template's to judge."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            function = {**call["function"], "arguments": change(call["function"].get("arguments"))}
            changed.append({**call, "function": function})
        else:
            changed.append(call)
    return {**message, "tool_calls": changed}


def _parsed_arguments(arguments: Any) -> Any:
    """JSON text of an object as a mapping; other text is left as it is."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _filled_arguments(arguments: Any) -> Any:
    return {} if arguments is None else arguments


def _marked(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The final message with a mark after its (last) text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_HERE}, content
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + _CONTINUE_HERE}
                return {**message, "content": [*content[:index], marked, *content[index + 1 :]]}, part["text"]
    raise InvalidRequestError("continue_final_message: the final message has no text to go on with", param="messages")


def _cut_at_mark(text: str, final_text: str) -> str:
    end = text.rfind(_CONTINUE_HERE.rstrip())
    if end < 0 or final_text.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message: the chat template does not show the final message as it stands", param="messages"
        )
    return text[:end] if text.startswith(_CONTINUE_HERE, end) else text[:end].rstrip()
