"""Owns the tree of full pages that requests with equal beginnings share; knows neither requests nor the device.

RadixAttention (Zheng et al. 2024): the tree is keyed by token ids, one node a full page, so that no node is split. A
page is put in as soon as the step that computes it is dispatched: whatever reads it is dispatched later, or is a later
token of the same step, and a layer writes its keys and values before it attends. What is only partly filled is never
shared: it is recomputed. Unused leaves go first, least recently used first.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxserve.scheduling.page_pool import PagePool

RootKey = tuple[tuple[str, str], ...]


def root_key(**parts: str | None) -> RootKey:
    """Names a tree by everything beside the tokens that keys and values depend on, each part tagged by its kind.

    A part that is None does not count: `root_key(model="m", salt=None) == (("model", "m"),)`. As kinds are part of the
    key, a salt never equals a tenant of the same name.
    """
    return tuple((kind, value) for kind, value in sorted(parts.items()) if value is not None)


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """One full page. The root of a tree has no parent and page 0, which holds nothing.

    Attributes:
      token_ids: the page's own tokens; with its ancestors' they are the whole prefix.
      last_used: when its last holder left it, as a count of such events.
      is_attached: still in the tree, so that it may be found and built upon.
    """

    root: RootKey
    parent: "Node | None"
    token_ids: tuple[int, ...]
    page: int
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    last_used: int = 0
    is_attached: bool = True


@dataclass(kw_only=True, slots=True, eq=False)
class Prefix:
    """How far one request's pages are in the tree: the first `depth` of them are, down to `node` (None at depth 0).

    Attributes:
      first_own: the first node that this request put in.
      generation: flushes of the cache before it began; after another one its pages are its own affair.
    """

    root: RootKey
    node: Node | None
    depth: int
    generation: int
    first_own: Node | None = None


class PrefixCache:
    """The pages that are kept, and all taking and giving of pages, since room is made by eviction.

    A request that holds a node's page holds its ancestors' pages too, so the pages nobody holds can all be evicted,
    leaves first: `available` is exact.

    Args:
      is_enabled: if not, nothing is kept and nothing is found.
    """

    def __init__(self, pool: PagePool, *, page_size: int, is_enabled: bool = True) -> None:
        self.pool = pool
        self.num_evictions = 0
        self._page_size = page_size
        self._is_enabled = is_enabled
        self._roots: dict[RootKey, Node] = {}
        self._nodes: dict[int, Node] = {}  # by page
        self._evictable: list[tuple[int, int, Node]] = []  # a heap, least recently used first; stale entries stay in it
        self._releases = itertools.count(1)
        self._pushes = itertools.count()
        self._generation = 0

    @property
    def available(self) -> int:
        """Pages that `allocate` could give now."""
        return self.pool.num_free + self.pool.num_cached

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, evicting as many as that needs. The caller has checked that they are available."""
        while self.pool.num_free < count:
            self._evict()
        return self.pool.allocate(count)

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one hold on each page. Those in the tree stay there until their room is needed."""
        self.pool.release(pages)
        now = next(self._releases)
        for page in pages:
            node = self._nodes.get(page)
            if node is not None and not self.pool.is_held(page):
                node.last_used = now
                if not node.children:
                    self._push(node)

    def match(self, root: RootKey, token_ids: Sequence[int]) -> list[Node]:
        """The nodes of the longest known prefix; never all tokens, since one has to be computed to sample from."""
        found: list[Node] = []
        node = self._roots.get(root)
        size = self._page_size
        for start in range(0, len(token_ids) - size, size):
            if node is None:
                break
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is not None:
                found.append(node)
        return found

    def open(self, root: RootKey, matched: Sequence[Node]) -> tuple[Prefix, list[int]]:
        """Takes a hold on a match's pages, and returns them with the prefix that goes on from there."""
        pages = [node.page for node in matched]
        self.pool.hold(pages)
        node = matched[-1] if matched else None
        return Prefix(root=root, node=node, depth=len(pages), generation=self._generation), pages

    def follow(self, prefix: Prefix, token_ids: Sequence[int], pages: list[int], end: int) -> int:
        """Goes on from the prefix while the tree has the next page, putting its pages in place of the request's own.

        Args:
          pages: of the request; changed in place.
          end: pages to go up to.

        Returns:
          The prefix's new depth.
        """
        while prefix.depth < end and self._may_grow(prefix):
            parent = prefix.node or self._roots.get(prefix.root)
            node = parent.children.get(self._page_tokens(token_ids, prefix.depth)) if parent is not None else None
            if node is None:
                break
            self._take(prefix, node, pages)
        return prefix.depth

    def insert(self, prefix: Prefix, token_ids: Sequence[int], pages: list[int], end: int) -> int | None:
        """Puts the request's pages up to `end` into the tree; where the tree has one already, the request takes that.

        Returns:
          The index of the first entry of `pages` that changed, or None.
        """
        first_changed: int | None = None
        while prefix.depth < end and self._may_grow(prefix):
            index = prefix.depth
            key = self._page_tokens(token_ids, index)
            parent = prefix.node or self._root(prefix.root)
            node = parent.children.get(key)
            if node is None:
                node = Node(root=prefix.root, parent=parent, token_ids=key, page=pages[index])
                parent.children[key] = self._nodes[node.page] = node
                self.pool.keep(node.page)
                prefix.first_own = prefix.first_own or node
            elif node.page != pages[index] and first_changed is None:
                first_changed = index
            self._take(prefix, node, pages)
        return first_changed

    def discard(self, prefix: Prefix) -> None:
        """Forgets every page that the prefix's request put in, and all that was built on them.

        For a request whose keys and values turn out to be wrong. Those who hold such pages keep them; nobody else finds
        them any more.
        """
        prefix.generation = -1
        if prefix.first_own is not None and prefix.first_own.is_attached:
            self._detach(prefix.first_own)

    def flush(self) -> int:
        """Forgets every page, and returns how many. Requests that run keep theirs, and share none of them any more."""
        count = len(self._nodes)
        self._generation += 1
        for root in list(self._roots.values()):
            for node in list(root.children.values()):
                self._detach(node)
        assert not self._nodes
        return count

    def kept_pages(self) -> tuple[int, ...]:
        """Every page in the tree, whether somebody holds it or not."""
        return tuple(self._nodes)

    def roots(self) -> tuple[Node, ...]:
        """Of the trees, the newest first; to read only."""
        return tuple(reversed(self._roots.values()))

    def check_integrity(self, held_by: dict[str, list[int]]) -> None:
        """Raises AssertionError unless tree, pool and holders agree."""
        self.pool.check_integrity(held_by, self._nodes)
        walked = {node.page: node for root in self._roots.values() for node in _subtree(root) if node.parent}
        assert walked == self._nodes, "the tree and its index differ"
        assert all(root.children for root in self._roots.values()), "a tree without pages was kept"
        entries = {id(node) for last_used, _, node in self._evictable if last_used == node.last_used}
        for page, node in self._nodes.items():
            assert node.is_attached
            assert len(node.token_ids) == self._page_size
            assert node.parent is not None
            is_held = self.pool.is_held(page)
            assert not is_held or node.parent.parent is None or self.pool.is_held(node.parent.page), (
                f"page {page} is held, but not the page before it"
            )
            assert is_held or node.children or id(node) in entries, f"page {page} could never be evicted"

    # --- the tree ---

    def _page_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self._page_size : (index + 1) * self._page_size])

    def _may_grow(self, prefix: Prefix) -> bool:
        is_current = prefix.generation == self._generation
        return self._is_enabled and is_current and (prefix.node is None or prefix.node.is_attached)

    def _root(self, key: RootKey) -> Node:
        return self._roots.setdefault(key, Node(root=key, parent=None, token_ids=(), page=0))

    def _take(self, prefix: Prefix, node: Node, pages: list[int]) -> None:
        """Moves the prefix down to a child. A page of the request's own that holds the same goes back to the pool."""
        own = pages[prefix.depth]
        if own != node.page:
            self.pool.hold([node.page])
            self.pool.release([own])
            pages[prefix.depth] = node.page
        prefix.node = node
        prefix.depth += 1

    def _evict(self) -> None:
        while True:
            last_used, _, node = heapq.heappop(self._evictable)  # never empty: the caller knows that there is one
            if self._is_evictable(node) and node.last_used == last_used:
                break
        parent = node.parent
        assert parent is not None
        self._detach(node)
        self.num_evictions += 1
        if parent.parent is not None and self._is_evictable(parent):
            self._push(parent)

    def _is_evictable(self, node: Node) -> bool:
        return node.is_attached and not node.children and not self.pool.is_held(node.page)

    def _push(self, node: Node) -> None:
        if len(self._evictable) > 2 * len(self._nodes) + 64:
            nodes: Iterable[Node] = filter(self._is_evictable, self._nodes.values())
            self._evictable = [(node.last_used, next(self._pushes), node) for node in nodes]
            heapq.heapify(self._evictable)
        heapq.heappush(self._evictable, (node.last_used, next(self._pushes), node))

    def _detach(self, top: Node) -> None:
        """Takes a node and all below it out of the tree."""
        parent = top.parent
        assert parent is not None
        del parent.children[top.token_ids]
        for node in _subtree(top):
            node.is_attached = False
            del self._nodes[node.page]
            self.pool.drop(node.page)
        if parent.parent is None and not parent.children:
            del self._roots[parent.root]  # salts come from outside: their trees must not outlive their pages


def _subtree(top: Node) -> list[Node]:
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes
