"""Owns which pages are free and how many sequences hold each of the others; does not know what is in them."""

from collections.abc import Iterable


class PagePool:
    """Pages 1 to num_pages - 1. Page 0 is the dummy that padding reads and writes; it is never handed out.

    `free + active == total` holds at all times (pages kept only by a prefix cache will count as a third kind).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed: the dummy page and one to use")
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def total(self) -> int:
        return len(self._holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.total - len(self._free)

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

    def release(self, pages: Iterable[int]) -> None:
        """Gives up one hold on each page; a page that nobody holds is free again.

        A step in flight may still write to a freed page. That is harmless: every step takes the pool's arrays from the
        step before it, so whoever gets the page next writes after that.
        """
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released more often than it was held"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check_integrity(self, held_by: dict[str, list[int]]) -> None:
        """Raises AssertionError, naming request and page, unless the pool and these holders agree page by page."""
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
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert all((page in free) == (self._holders[page] == 0) for page in range(1, len(self._holders)))
