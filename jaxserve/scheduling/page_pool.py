"""Owns which pages are free, kept for later or held, and by how many sequences; does not know what is in them."""

from collections.abc import Iterable, Sequence


class PagePool:
    """Pages 1 to num_pages - 1. Page 0 is the dummy that padding reads and writes; it is never handed out.

    A page is free, active (at least one sequence holds it) or cached (nobody holds it, but the prefix cache keeps it):
    `free + cached + active == total` at all times.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed: the dummy page and one to use")
        self._holders = [0] * num_pages
        self._is_kept = [False] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self.num_cached = 0
        self.num_shared = 0

    @property
    def total(self) -> int:
        return len(self._holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.total - len(self._free) - self.num_cached

    def is_held(self, page: int) -> bool:
        return self._holders[page] > 0

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, each with one holder. The caller has checked that there are as many."""
        assert count <= len(self._free), (count, len(self._free))
        if not count:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds one hold to each page, all of which are active or cached."""
        for page in pages:
            holders = self._holders[page]
            if holders == 0:
                assert self._is_kept[page], f"page {page} is free; only allocate gives it away"
                self.num_cached -= 1
            elif holders == 1:
                self.num_shared += 1
            self._holders[page] = holders + 1

    def release(self, pages: Sequence[int]) -> None:
        """Gives up one hold on each page; a page that nobody holds is free again, or cached where it is kept.

        A step in flight may still write to a freed page. That is harmless: every step takes the pool's arrays from the
        step before it, so whoever gets the page next writes after that.
        """
        for page in pages:
            holders = self._holders[page] - 1
            assert holders >= 0, f"page {page} was released more often than it was held"
            self._holders[page] = holders
            if holders == 1:
                self.num_shared -= 1
            elif holders == 0:
                if self._is_kept[page]:
                    self.num_cached += 1
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """From now on an active page is cached, not free, when its last holder leaves."""
        assert self._holders[page], f"page {page} is not active"
        assert not self._is_kept[page], f"page {page} is kept already"
        self._is_kept[page] = True

    def drop(self, page: int) -> None:
        """Ends `keep`: a cached page is free at once, an active one when its last holder leaves."""
        assert self._is_kept[page], f"page {page} is not kept"
        self._is_kept[page] = False
        if not self._holders[page]:
            self.num_cached -= 1
            self._free.append(page)

    def check_integrity(self, held_by: dict[str, list[int]], kept: Iterable[int] = ()) -> None:
        """Raises AssertionError, naming request and page, unless the pool, these holders and the cache agree."""
        expected = [0] * len(self._holders)
        for request_id, pages in held_by.items():
            assert 0 not in pages, f"request {request_id} holds the dummy page"
            assert len(set(pages)) == len(pages), f"request {request_id} holds a page twice: {pages}"
            for page in pages:
                expected[page] += 1
        for page, (holders, want) in enumerate(zip(self._holders, expected, strict=True)):
            if holders != want:
                owners = [request_id for request_id, pages in held_by.items() if page in pages]
                raise AssertionError(f"page {page} counts {holders} holders; it has {want}: {owners}")
        kept = set(kept)
        for page, is_kept in enumerate(self._is_kept):
            assert is_kept == (page in kept), f"page {page}: kept is {is_kept}, but the cache says otherwise"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page in range(1, len(self._holders)):
            is_unused = not self._holders[page] and not self._is_kept[page]
            assert (page in free) == is_unused, f"page {page}: free is {page in free}, unused is {is_unused}"
        assert self.num_cached == sum(not self._holders[page] for page in kept)
        assert self.num_shared == sum(holders > 1 for holders in self._holders)
