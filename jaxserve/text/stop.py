"""Finds stop strings in streamed text; owns the text that might still become one, knows no tokens."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _Node:
    """A prefix of stop strings: the first `depth` characters of `stop`.

    Attributes:
      children: next character → node.
      fallback: the node of the longest proper suffix that is itself a prefix of a stop string.
      match: the longest stop string that ends here, itself or a suffix of it.
    """

    stop: str
    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    match: str | None = None


class StopStrings:
    """Watches one output's text for stop strings (Aho and Corasick 1975), in time linear in the text.

    The stop string that is complete first wins; of several that end at the same character, the longest, which began
    first. How the text is cut into pushes changes neither the match nor the text that is shown.

    Text is held back exactly while it could still become part of a stop string: the longest end of the text that begins
    one. With `include` nothing is held, since every such text is shown either way.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """Args: stops: none of them empty. include: the matched string is shown, too.

        The choices of one request share the automaton, which is many times as large as the strings.
        """
        assert all(stops), "an empty stop string matches everywhere"
        self._include = include
        self._node = self._root = _build(tuple(stops))

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next text; returns what may be shown now and the stop string found, if any: then push no more.

        Args:
          may_stop: False lets a stop string that ends in this text pass; one that ends later still counts.
        """
        if not self._root.children:
            return text, None  # nearly every request has no stop strings
        start, node = self._node, self._node
        for index, char in enumerate(text):
            while char not in node.children and node.fallback is not None:
                node = node.fallback
            node = node.children.get(char, self._root)
            if node.match is not None and may_stop:
                end = index + 1
                self._node = self._root
                if self._include:
                    return text[:end], node.match
                return _first(start, text, start.depth + end - len(node.match)), node.match
        self._node = node
        if self._include:
            return text, None
        return _first(start, text, start.depth + len(text) - node.depth), None

    def finish(self) -> str:
        """The text still held back, when the output ended without a match."""
        held = "" if self._include else self._node.stop[: self._node.depth]
        self._node = self._root
        return held


def _first(held: _Node, text: str, length: int) -> str:
    """The first characters of the held text (a node spells it) followed by `text`, without joining them."""
    if length <= held.depth:
        return held.stop[:length]
    return held.stop[: held.depth] + text[: length - held.depth]


@lru_cache(maxsize=16)
def _build(stops: tuple[str, ...]) -> _Node:
    root = _Node("", 0)
    for stop in stops:
        node = root
        for depth, char in enumerate(stop, start=1):
            node = node.children.setdefault(char, _Node(stop, depth))
        node.match = stop
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for char, child in parent.children.items():
            suffix = parent.fallback
            while suffix is not None and char not in suffix.children:
                suffix = suffix.fallback
            child.fallback = root if suffix is None else suffix.children[char]
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root
