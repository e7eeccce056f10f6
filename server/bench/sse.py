"""Splits a byte stream into server-sent events (WHATWG HTML, 9.2.6); knows nothing of what is in them."""

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    kind: str  # "message" unless the stream names another
    data: str


class EventParser:
    """Takes bytes as they come, split anywhere, and gives each event as soon as its last byte is there.

    Lines may end in LF, CR LF or CR. A CR ends its line at once, for the next byte may be long in coming; an LF that
    then follows belongs to it.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._at_start = True
        self._after_cr = False
        self._kind = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[Event]:
        buffer = self._rest + data
        if self._at_start:
            if len(buffer) < len(_BOM) and _BOM.startswith(buffer):
                self._rest = buffer
                return []
            buffer = buffer.removeprefix(_BOM)
            self._at_start = False
        if self._after_cr and buffer:
            buffer = buffer.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in buffer:
            *lines, self._rest = _LINE_END.split(buffer)
            self._after_cr = buffer.endswith(b"\r")
        else:
            *lines, self._rest = buffer.split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._line(line, events)
        return events

    def close(self) -> list[Event]:
        """The event that the end of the stream cut short of its blank line, if there is one.

        The standard drops it. A caller that wants to know what the server sent looks at it.
        """
        events: list[Event] = []
        if self._rest:
            self._line(self._rest, events)
        self._rest = b""
        self._line(b"", events)
        return events

    def _line(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._kind or "message", "\n".join(self._data)))
                self._data = []
            self._kind = ""
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode(errors="replace"))
        elif name == b"event":
            self._kind = value.removeprefix(b" ").decode(errors="replace")
        # An empty name is a comment; id and retry are for clients that connect again.
