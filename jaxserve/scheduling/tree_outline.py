"""Writes the prefix tree as a few lines, of what sizes and holders its branches are; tells none of their tokens."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from jaxserve.scheduling.prefix_cache import Node

MAX_LINES = 40
MAX_NODES = 2048  # looked at for one outline: this runs between two steps
MAX_CHILDREN = 8  # shown of one node, the newest


class TreeLine(NamedTuple):
    """A run of pages without a fork, all with as many holders, and all on the device or all in host memory.

    Attributes:
      depth: forks above it.
      hidden: branches that start at its end and are not shown.
      is_private: of a tree that only requests with the same salt or tenant can find.
    """

    depth: int
    pages: int
    holders: int
    hidden: int
    is_private: bool
    is_on_host: bool


def outline(roots: Iterable[Node], num_holders: Callable[[int], int]) -> tuple[TreeLine, ...]:
    """At most `MAX_LINES`, the newest branches first; `num_holders` is of a page."""
    lines: list[TreeLine] = []
    nodes_left = MAX_NODES
    todo = [(node, 0) for root in islice(roots, MAX_LINES) for node in _newest(root)]
    todo.reverse()
    while todo and nodes_left > 0 and len(lines) < MAX_LINES:
        node, depth = todo.pop()
        holders = num_holders(node.page)
        pages = 1
        while len(node.children) == 1 and pages < nodes_left:
            (child,) = node.children.values()
            if num_holders(child.page) != holders or (child.host_page is None) != (node.host_page is None):
                break
            node = child
            pages += 1
        nodes_left -= pages
        is_private = any(kind in ("salt", "tenant") for kind, _ in node.root)
        hidden = max(0, len(node.children) - MAX_CHILDREN)
        lines.append(TreeLine(depth, pages, holders, hidden, is_private, node.host_page is not None))
        todo += [(child, depth + 1) for child in reversed(_newest(node))]
    return tuple(lines)


def _newest(node: Node) -> list[Node]:
    return list(islice(reversed(node.children.values()), MAX_CHILDREN))
