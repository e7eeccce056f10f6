"""Owns which places of host memory hold evicted pages, and the copies that the next step waits for; not their contents.

The second tier of a prefix cache, as SGLang's hierarchical cache and vLLM's offloading have it: a page that the device
has no room for any more goes to host memory, and comes back by copy when a prompt wants it. What came back stays on
the host as well until its room is wanted: evicted again, it needs no copy. Such duplicates are the first to go, so the
sizes of the two tiers add up.
"""

import sys
from collections import OrderedDict
from dataclasses import dataclass

COPY_PAGES = (1, 4, 16)  # of a compiled call: what decoding evicts, what short prompts do, what long ones do
# Calls whose pages are on their way at once. They take room on the device beside the pool: 128 pages, or 256 MiB of
# Llama-3-8B in bfloat16. What a step moves beyond that waits for those before.
MOST_ON_THE_WAY = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """What is copied before a step runs: first all that is saved, then all that is restored.

    Attributes:
      saved: (page, host page), of the pages as the step before leaves them; no host page twice.
      restored: (host page, page). A host page may be one that is saved just now; none of them is saved over.
    """

    saved: tuple[tuple[int, int], ...]
    restored: tuple[tuple[int, int], ...]


class HostTier:
    """Host pages 0 to num_pages - 1, each free, held by a node of the prefix tree (least recently used first), or a
    duplicate of a page on the device.

    A node's host page counts as used when it is saved and when a prompt finds it. Children are saved before their
    parents and found after them, so `touch` goes from the last page of a prefix to its first, and the least recently
    used host page always belongs to a node without children.

    Attributes:
      max_saves: pages that are saved before the next step at most.
      num_saved, num_restored: copies so far; those to the host count once they are handed over.
    """

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages
        self.max_saves = sys.maxsize
        self.num_saved = self.num_restored = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: OrderedDict[int, None] = OrderedDict()
        self._duplicates: dict[int, None] = {}  # in the order in which they were restored
        self._leaving: list[int] = []  # given up, but not to be saved over until they are restored
        self._to_save: dict[int, int] = {}  # page by host page, the oldest first
        self._to_restore: list[tuple[int, int]] = []
        self._restoring: set[int] = set()  # their host pages

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    @property
    def may_save(self) -> bool:
        """Before the next step."""
        return len(self._to_save) < self.max_saves

    def oldest_save(self) -> int | None:
        """Of the host pages still to be saved, the one to give up first; None if all are to be restored, too."""
        return next((host_page for host_page in self._to_save if host_page not in self._restoring), None)

    def oldest(self) -> int | None:
        """The host page to give up first."""
        return next(iter(self._held), None)

    def held(self) -> list[int]:
        """The oldest first."""
        return list(self._held)

    def duplicates(self) -> list[int]:
        """The oldest first."""
        return list(self._duplicates)

    def save(self, page: int) -> int:
        """Takes a free host page for a page of the device, which may be given away at once: the copy comes first."""
        host_page = self._free.pop()
        self._held[host_page] = None
        self._to_save[host_page] = page
        return host_page

    def restore(self, host_page: int, page: int) -> None:
        """Copies a host page back to a page of the device, of which it is a duplicate from now on."""
        del self._held[host_page]
        self._duplicates[host_page] = None
        self._to_restore.append((host_page, page))
        self._restoring.add(host_page)
        self.num_restored += 1

    def hold_again(self, duplicate: int) -> None:
        """Its page leaves the device: nothing is copied, as the contents are here already."""
        del self._duplicates[duplicate]
        self._held[duplicate] = None

    def oldest_duplicate(self) -> int | None:
        """The duplicate to give up first, or None if that would make no room now."""
        oldest = next(iter(self._duplicates), None)
        return None if oldest in self._restoring else oldest

    def drop(self, host_page: int) -> None:
        """Gives up a host page, held or a duplicate."""
        if host_page in self._duplicates:
            del self._duplicates[host_page]
        else:
            del self._held[host_page]
        if host_page in self._restoring:
            self._leaving.append(host_page)
        else:
            self._to_save.pop(host_page, None)
            self._free.append(host_page)

    def touch(self, host_page: int) -> None:
        self._held.move_to_end(host_page)
        if host_page in self._to_save:
            self._to_save[host_page] = self._to_save.pop(host_page)

    def hand_over(self) -> Copies | None:
        """The copies to dispatch before the next step; from now on they are the device's affair."""
        if not self._to_save and not self._to_restore:
            return None
        copies = Copies(
            saved=tuple((page, host_page) for host_page, page in self._to_save.items()),
            restored=tuple(self._to_restore),
        )
        self.num_saved += len(copies.saved)
        self._free += self._leaving
        self._to_save, self._to_restore, self._restoring, self._leaving = {}, [], set(), []
        return copies

    def check_integrity(self) -> None:
        """Raises AssertionError unless every host page is in one place."""
        kept = [*self._held, *self._duplicates, *self._leaving]
        assert sorted([*self._free, *kept]) == list(range(self.total)), "host pages got lost"
        assert self._to_save.keys() <= set(kept), "a host page is written that nobody holds"
        assert {host_page for host_page, _ in self._to_restore} == self._restoring <= set(kept)
