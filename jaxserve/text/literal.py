"""Keeps special tokens that a message spells out from becoming ones: `<|im_end|>` in a user's text ends nothing.

The template must still see the text, and the tokenizer must know which of the special tokens in the whole prompt are
the template's and which are a message's. So each that a message spells is broken by a mark before the template runs;
after it the marks are taken out, and where they stood is what `Tokenizer.encode_chat` is told.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError

# Noncharacters: Unicode keeps them for such uses inside a program, and no text should hold one.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
# Not a message's own words, but what templates look at.
_STRUCTURE = frozenset(("role", "type", "id", "tool_call_id"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedMessages:
    """Messages whose spelled-out special tokens are broken by `mark`; as they came, and no mark, if there are none."""

    messages: Sequence[Mapping[str, Any]]
    mark: str | None

    def unmark(self, rendered: str) -> tuple[str, frozenset[int]]:
        """The prompt's text, and the places (characters) in it where a message, not the template, spells a token."""
        if self.mark is None:
            return rendered, frozenset()
        pieces = rendered.split(self.mark)
        places, length = [], 0
        for piece in pieces[:-1]:
            length += len(piece)
            places.append(length - 1)  # the mark stands after the token's first character
        return "".join(pieces), frozenset(places)


def mark_messages(messages: Sequence[Mapping[str, Any]], special_tokens: Collection[str]) -> MarkedMessages:
    """Breaks every special token that a message spells; see `MarkedMessages`.

    Raises:
      InvalidRequestError: no noncharacter is left for the mark.
    """
    spelled = re.compile("|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token))
    if not special_tokens:
        return MarkedMessages(messages=messages, mark=None)
    messages = [_unescaped(message, spelled) for message in messages]
    if not any(_holds(spelled, message) for message in messages):
        return MarkedMessages(messages=messages, mark=None)
    unused = (mark for mark in _MARKS if not any(_holds(re.compile(mark), message) for message in messages))
    mark = next(unused, None)
    if mark is None:
        raise InvalidRequestError(
            "the messages spell special tokens and hold every noncharacter from U+FDD0 to U+FDEF, which are no text",
            param="messages",
        )

    def broken(match: re.Match[str]) -> str:
        return match[0][0] + mark + match[0][1:]

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return spelled.sub(broken, value)
        if isinstance(value, Mapping):
            return {key: item if key in _STRUCTURE else marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    return MarkedMessages(messages=[marked(message) for message in messages], mark=mark)


def _unescaped(value: Any, spelled: re.Pattern[str]) -> Any:
    """Calls' arguments whose JSON hides a special token in escapes, without these: a template may read the JSON."""
    if isinstance(value, Mapping):
        return {
            key: _plain_json(item, spelled) if key == "arguments" else _unescaped(item, spelled)
            for key, item in value.items()
        }
    return [_unescaped(item, spelled) for item in value] if isinstance(value, list) else value


def _plain_json(arguments: Any, spelled: re.Pattern[str]) -> Any:
    if not isinstance(arguments, str) or "\\" not in arguments:
        return arguments
    try:
        plain = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
    return plain if spelled.search(plain) else arguments


def _holds(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(key not in _STRUCTURE and _holds(pattern, item) for key, item in value.items())
    return isinstance(value, list) and any(_holds(pattern, item) for item in value)
