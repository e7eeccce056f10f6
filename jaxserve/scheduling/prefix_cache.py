"""Owns the tree of full pages that requests with equal beginnings share; knows neither requests nor the device.

RadixAttention (Zheng et al. 2024): the tree is keyed by token ids, one node a full page, so that no node is split. A
page is put in as soon as the step that computes it is dispatched: whatever reads it is dispatched later, or is a later
token of the same step, and a layer writes its keys and values before it attends. What is only partly filled is never
shared: it is recomputed. Unused leaves go first, least recently used first: to host memory where there is a tier of it.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxserve.scheduling.host_tier import Copies, HostTier
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
    """One full page, on the device or, then below all that are, in host memory. A root has no parent and holds nothing.

    Attributes:
      token_ids: the page's own tokens; with its ancestors' they are the whole prefix.
      page: of the device; 0 where it is not there.
      host_page: where it is in host memory; None while it is on the device.
      duplicate: where host memory has it too, while it is on the device.
      num_on_device: children that are on the device.
      last_used: when its last holder left it, as a count of such events.
      is_attached: still in the tree, so that it may be found and built upon.
    """

    root: RootKey
    parent: "Node | None"
    token_ids: tuple[int, ...]
    page: int
    host_page: int | None = None
    duplicate: int | None = None
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    num_on_device: int = 0
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


def always(depth: int, count: int) -> bool:
    """Every copy from host memory pays."""
    return True


class PrefixCache:
    """The pages that are kept, and all taking and giving of pages, since room is made by eviction.

    A request that holds a node's page holds its ancestors' pages too, so the pages nobody holds can all be evicted,
    leaves first: `available` is exact.

    Args:
      host_pages: evicted pages that are kept in host memory, at most.
      pays: whether so many pages, after so many others, come back from there; or else they are computed again.
      is_enabled: if not, nothing is kept and nothing is found.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        host_pages: int = 0,
        pays: Callable[[int, int], bool] = always,
        is_enabled: bool = True,
    ) -> None:
        self.pool = pool
        self.host = HostTier(host_pages)
        self.num_evictions = 0
        self.num_unsaved = 0  # evicted pages that were lost because a step had no more copies for them
        self.num_host_hits = 0  # times that a prompt went on from pages in host memory
        self._page_size = page_size
        self._is_enabled = is_enabled
        self._roots: dict[RootKey, Node] = {}
        self._nodes: dict[int, Node] = {}  # by page
        self._on_host: dict[int, Node] = {}  # by host page
        self._duplicated: dict[int, Node] = {}  # by duplicate
        self._pays = pays
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
                if not node.num_on_device:
                    self._push(node)

    def match(self, root: RootKey, token_ids: Sequence[int]) -> list[Node]:
        """The nodes of the longest known prefix; never all tokens, since one has to be computed to sample from.

        Those on the device come first; what follows is on the host, and worth its copies.
        """
        top = self._roots.get(root)
        found = [] if top is None else self._path(top, token_ids, 0, (len(token_ids) - 1) // self._page_size)
        on_device = _num_on_device(found) if self._on_host else len(found)
        if on_device < len(found) and not self._pays(on_device, len(found) - on_device):
            del found[on_device:]
        return found

    def open(self, root: RootKey, matched: Sequence[Node]) -> tuple[Prefix, list[int]]:
        """Takes a hold on a match's pages on the device, and returns them with the prefix that goes on from there.

        What the match has on the host stays there as long as possible: `follow` brings it back to the request's pages.
        """
        on_device = matched[: _num_on_device(matched)]
        pages = [node.page for node in on_device]
        self.pool.hold(pages)
        for node in reversed(matched[len(pages) :]):
            assert node.host_page is not None
            self.host.touch(node.host_page)
        node_or_none = on_device[-1] if on_device else None
        return Prefix(root=root, node=node_or_none, depth=len(pages), generation=self._generation), pages

    def follow(
        self, prefix: Prefix, token_ids: Sequence[int], pages: list[int], end: int, *, max_restored: int
    ) -> bool:
        """Goes on from the prefix while the tree has the next page, putting its pages in place of the request's own.

        What is on the host is copied into the request's own pages, which the tree then has.

        Args:
          pages: of the request; changed in place.
          end: pages to go up to.
          max_restored: pages that may come from the host at most.

        Returns:
          False where the next pages are on the host and wait for another call.
        """
        while prefix.depth < end and self._may_grow(prefix):
            parent = prefix.node or self._roots.get(prefix.root)
            node = parent.children.get(self._page_tokens(token_ids, prefix.depth)) if parent is not None else None
            if node is None:
                break
            if node.host_page is None:
                self._take(prefix, node, pages)
                continue
            run = [node, *self._path(node, token_ids, prefix.depth + 1, end)]
            if not self._pays(prefix.depth, len(run)):
                break
            if not max_restored:
                return False
            self.num_host_hits += 1
            for node in run[:max_restored]:
                assert node.host_page is not None
                node.duplicate = node.host_page
                self._duplicated[node.duplicate] = node
                self.host.restore(node.duplicate, pages[prefix.depth])
                self._bring_back(node, pages[prefix.depth])
                self._take(prefix, node, pages)
            max_restored = max(0, max_restored - len(run))
        return True

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
                parent.num_on_device += 1
                self.pool.keep(node.page)
                prefix.first_own = prefix.first_own or node
            elif node.host_page is not None:  # the request has computed it again
                self.host.drop(node.host_page)
                self._bring_back(node, pages[index])
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

    def take_copies(self) -> Copies | None:
        """What has to be copied before the next step, if anything."""
        return self.host.hand_over()

    def flush(self) -> int:
        """Forgets every page, on the host too, and returns how many. Requests that run keep theirs, and share none of
        them any more."""
        count = len(self._nodes) + len(self._on_host)
        self._generation += 1
        for root in list(self._roots.values()):
            for node in list(root.children.values()):
                self._detach(node)
        assert not self._nodes
        assert not self._on_host
        assert not self._duplicated
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
        self.host.check_integrity()
        age = {host_page: number for number, host_page in enumerate(self.host.held())}
        assert age.keys() == self._on_host.keys(), "tree and host memory differ"
        nodes = [node for root in self._roots.values() for node in _subtree(root)]
        assert {node.page: node for node in nodes if node.page} == self._nodes, "the tree and its index differ"
        on_host = {node.host_page: node for node in nodes if node.host_page is not None}
        assert on_host == self._on_host, "the tree and its index of host pages differ"
        assert all(root.children for root in self._roots.values()), "a tree without pages was kept"
        duplicated = {node.duplicate: node for node in nodes if node.duplicate is not None}
        assert duplicated == self._duplicated, "the tree and its index of duplicates differ"
        assert duplicated.keys() == set(self.host.duplicates()), "tree and duplicates in host memory differ"
        entries = {id(node) for last_used, _, node in self._evictable if last_used == node.last_used}
        for node in nodes:
            assert node.is_attached
            assert node.num_on_device == sum(child.host_page is None for child in node.children.values())
            if node.parent is None:
                continue
            assert len(node.token_ids) == self._page_size
            assert (node.page == 0) == (node.host_page is not None), "a page is in one of the two, and only there"
            if node.host_page is not None:
                assert node.duplicate is None
                assert not node.num_on_device, "a page on the device follows one that is not"
                before = node.parent.host_page
                assert before is None or age[before] > age[node.host_page], (
                    "a host page would go before what follows it"
                )
                continue
            is_held = self.pool.is_held(node.page)
            assert not is_held or node.parent.parent is None or self.pool.is_held(node.parent.page), (
                f"page {node.page} is held, but not the page before it"
            )
            assert is_held or node.num_on_device or id(node) in entries, f"page {node.page} could never be evicted"

    # --- the tree ---

    def _page_tokens(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self._page_size : (index + 1) * self._page_size])

    def _path(self, node: Node, token_ids: Sequence[int], start: int, end: int) -> list[Node]:
        """The nodes below `node` that hold pages start to end - 1 of the tokens, as far as there are any."""
        found: list[Node] = []
        for index in range(start, end):
            child = node.children.get(self._page_tokens(token_ids, index))
            if child is None:
                break
            found.append(child)
            node = child
        return found

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
        self.num_evictions += 1
        if not (self.host.total and self._save(node)):
            self._detach(node)
        if parent.parent is not None and self._is_evictable(parent):
            self._push(parent)

    def _save(self, node: Node) -> bool:
        """Moves a node to host memory, in place of the one there that was used least recently; or says it cannot."""
        if node.duplicate is not None:
            host_page, node.duplicate = node.duplicate, None
            del self._duplicated[host_page]
            self.host.hold_again(host_page)
        else:
            if not self.host.may_save and not self._give_up_a_save():
                return False
            if not self.host.has_room:
                self._make_room_on_host()
            if not self.host.has_room:
                return False
            host_page = self.host.save(node.page)
        page, node.page, node.host_page = node.page, 0, host_page
        self._on_host[host_page] = node
        self._leave_device(node, page)
        return True

    def _give_up_a_save(self) -> bool:
        """Loses the page that was evicted first of those that the next step saves: whatever is evicted after it was
        used later, or stands before it in the same prefix. False where none can be."""
        self.num_unsaved += 1
        oldest = self.host.oldest_save()
        if oldest is not None:
            self._detach(self._on_host[oldest])
        return oldest is not None

    def _make_room_on_host(self) -> None:
        """Gives up the oldest duplicate or else the page used least recently; what is still to be read makes none."""
        if (duplicate := self.host.oldest_duplicate()) is not None:
            self._drop_duplicate(self._duplicated[duplicate])
        elif (oldest := self.host.oldest()) is not None:
            self._detach(self._on_host[oldest])

    def _drop_duplicate(self, node: Node) -> None:
        assert node.duplicate is not None
        self.host.drop(node.duplicate)
        del self._duplicated[node.duplicate]
        node.duplicate = None

    def _bring_back(self, node: Node, page: int) -> None:
        """Moves a node from host memory to a page of the device that its holder has for it."""
        assert node.host_page is not None
        assert node.parent is not None
        del self._on_host[node.host_page]
        node.page, node.host_page = page, None
        node.parent.num_on_device += 1
        self._nodes[page] = node
        self.pool.keep(page)

    def _leave_device(self, node: Node, page: int) -> None:
        assert node.parent is not None
        node.parent.num_on_device -= 1
        del self._nodes[page]
        self.pool.drop(page)

    def _is_evictable(self, node: Node) -> bool:
        is_on_device = node.is_attached and node.host_page is None
        return is_on_device and not node.num_on_device and not self.pool.is_held(node.page)

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
            if node.host_page is None:
                self._leave_device(node, node.page)
                if node.duplicate is not None:
                    self._drop_duplicate(node)
            else:
                self.host.drop(node.host_page)
                del self._on_host[node.host_page]
        if parent.parent is None and not parent.children:
            del self._roots[parent.root]  # salts come from outside: their trees must not outlive their pages


def _subtree(top: Node) -> list[Node]:
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _num_on_device(path: Sequence[Node]) -> int:
    """How many of a path's nodes are on the device; they come first."""
    return next((i for i, node in enumerate(path) if node.host_page is not None), len(path))
