"""Keeps responses for a while, so that later requests can read and continue them; knows not how they are made."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from server.api.conversation import Message


@dataclass(kw_only=True, slots=True)
class StoredResponse:
    """A response and the conversation up to it.

    Attributes:
      body: OpenAI's object, as of now: it is replaced when the response ends.
      messages: the conversation that led to it, and its own answer once it has ended.
      chars: what it is counted as against the store's limit.
    """

    body: dict[str, Any]
    messages: tuple[Message, ...]
    chars: int


class ResponseStore:
    """The latest responses, bounded in number and in characters; the one unread for longest goes first.

    Belongs to the event loop. In the memory of this process alone: a restart forgets all of them.
    """

    def __init__(self, *, max_responses: int, max_chars: int) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._chars = 0

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._responses.get(response_id)
        if found is not None:
            self._responses.move_to_end(response_id)
        return found

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response, in place of an earlier state of it; others go where there is no room."""
        self.delete(response_id)
        self._responses[response_id] = stored
        self._chars += stored.chars
        while self._responses and (len(self._responses) > self._max_responses or self._chars > self._max_chars):
            self.delete(next(iter(self._responses)))

    def delete(self, response_id: str) -> bool:
        """Forgets a response; says whether it was there."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self._chars -= stored.chars
        return True
