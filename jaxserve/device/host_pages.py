"""Owns the contents of evicted pages in host memory, and moves them to and from the device; decides nothing.

All copies are dispatched in the order of the steps. A page that goes out is gathered after the steps that wrote it and
before the one that writes it next; its way to the host goes on while that one runs, and nobody waits for it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxserve.device.page_copies import copy_structs
from jaxserve.device.programs import Programs, ProgramSpec
from jaxserve.scheduling.host_tier import COPY_PAGES, MOST_ON_THE_WAY, Copies
from models.step import KVPool

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """Pages on their way to the host."""

    host_pages: tuple[int, ...]
    copies: list[Array]


class HostPages:
    """Args: num_pages: room for them is set aside; the system gives the memory as it is first written."""

    def __init__(self, spec: ProgramSpec, programs: Programs, num_pages: int) -> None:
        structs = copy_structs(spec.state().kv, num_pages)
        self._store: list[HostArray] = [np.empty(struct.shape, struct.dtype) for struct in structs]
        self._programs = programs
        self._on_the_way: deque[_Save] = deque()

    def copy(self, copies: Copies, kv: KVPool) -> KVPool:
        """Dispatches copies, after all steps dispatched so far.

        Args:
          kv: donated where anything is restored.
        """
        self._land(len(self._on_the_way))  # of earlier calls: a step was read since, so they are there or nearly
        for moves in _batches(copies.saved):
            if len(self._on_the_way) >= MOST_ON_THE_WAY:
                self._land(1)
            size = _bucket(len(moves))
            page_ids = np.zeros(size, np.int32)
            page_ids[: len(moves)] = [page for page, _ in moves]
            save = _Save(
                host_pages=tuple(host_page for _, host_page in moves),
                copies=self._programs.gather_pages[size](kv, page_ids),
            )
            for array in save.copies:
                array.copy_to_host_async()
            self._on_the_way.append(save)
        self._land_until({host_page for host_page, _ in copies.restored})
        for number, moves in enumerate(_batches(copies.restored), start=1):
            # Padding repeats a page: what nobody wrote, as the rest of the store, is not for the dummy page either.
            padded = [*moves, *[moves[0]] * (_bucket(len(moves)) - len(moves))]
            host_pages = [host_page for host_page, _ in padded]
            page_ids = np.array([page for _, page in padded], np.int32)
            arrays = [array[host_pages] for array in self._store]  # a copy, which nobody changes on its way
            kv = self._programs.scatter_pages[len(padded)](kv, page_ids, arrays)
            if number % MOST_ON_THE_WAY == 0:
                jax.block_until_ready(kv)
        return kv

    def _land_until(self, host_pages: set[int]) -> None:
        """Waits for the saves of these host pages: such as were evicted and wanted back within one step."""
        wanted = [i for i, save in enumerate(self._on_the_way, start=1) if not host_pages.isdisjoint(save.host_pages)]
        self._land(max(wanted, default=0))

    def _land(self, count: int) -> None:
        """Puts the oldest saves into their places."""
        for _ in range(count):
            save = self._on_the_way.popleft()
            for array, copy in zip(self._store, save.copies, strict=True):
                array[list(save.host_pages)] = np.asarray(copy)[: len(save.host_pages)]


def _batches(moves: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    for start in range(0, len(moves), COPY_PAGES[-1]):
        yield moves[start : start + COPY_PAGES[-1]]


def _bucket(count: int) -> int:
    return next(size for size in COPY_PAGES if size >= count)
