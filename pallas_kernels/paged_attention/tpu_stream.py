"""The stream of KV pages of the TPU kernel: which pages come next, their copies, and what the two buffers hold."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SPAN = 1 << 26  # tokens of context that the coordinates of 32 rows leave room for
TABLE_CHUNK = 128  # entries of a block table that travel to SMEM together
RING = 32  # chunks in SMEM; a step of short rows uses one a page

# What a core remembers of its way through the stream, from step to step and program to program; an SMEM array's fields.
ROW, PAGE, CHUNK = 0, 1, 2  # where the next step begins; CHUNK counts the chunks used up
CHUNK_ROW, CHUNK_INDEX, CHUNKS_FETCHED = 3, 4, 5  # the next chunk to fetch, and how many were
STEP, OWNER = 6, 7  # the step to compute next, and the program whose rows it belongs to
WALK = 8

Scalar = Array | int
Ref = Any  # of SMEM, VMEM or HBM; jax gives it no usable static type


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """One core's walk through the pages of its rows: what is fetched next, and what the two buffers hold.

    A segment is a run of pages within a step that are of one row and one chunk of its block table.
    """

    end_row: Array  # the row after the core's last
    rows: int  # of a program
    width: int  # entries of a block table, in whole chunks
    sliding_window: int | None
    tables: Ref
    starts: Ref
    lengths: Ref
    next_real: Ref  # of each row: itself, or the first after it that is no padding
    table_hbm: Ref
    kv_hbm: Ref
    scales_hbm: Ref | None  # of pages in a narrow format
    buffers: Ref
    scale_buffers: Ref | None
    ring: Ref
    page_ids: Ref
    segments: Ref
    counts: Ref
    walk: Ref
    ring_arrived: Ref
    step_arrived: Ref

    @property
    def page_size(self) -> int:
        return int(self.kv_hbm.shape[2])

    @property
    def step_pages(self) -> int:
        return int(self.page_ids.shape[1])

    def first_visible(self, row: Array) -> Array:
        """The first position that any query of the row sees."""
        if self.sliding_window is None:
            return jnp.int32(0)
        return jnp.maximum(0, self.starts[row] - (self.sliding_window - 1))

    def first_page(self, row: Array) -> Array:
        return lax.div(self.first_visible(row), self.page_size)

    def end_page(self, row: Array) -> Array:
        return lax.div(self.lengths[row] + (self.page_size - 1), self.page_size)

    def real_row(self, row: Array) -> Array:
        """The row itself, or the next that is no padding, or `end_row`."""
        return jnp.minimum(self.next_real[row], self.end_row)

    def begin(self, first_row: Array) -> None:
        """Fills the ring with chunks of the block tables and starts the first step's copies."""
        row = self.real_row(first_row)
        self.walk[ROW] = self.walk[CHUNK_ROW] = row
        self.walk[PAGE] = self.first_page(row)
        self.walk[CHUNK_INDEX] = lax.div(self.first_page(row), TABLE_CHUNK)
        self.walk[CHUNK] = self.walk[CHUNKS_FETCHED] = self.walk[STEP] = 0
        lax.fori_loop(0, RING, lambda i, _: self.fetch_chunk(), None)
        self.walk[OWNER] = self.fetch(jnp.int32(0))

    def chunk_copy(self, offset: Array, chunk: Array) -> Any:
        place = lax.rem(chunk, RING)
        source = self.table_hbm.at[pl.ds(pl.multiple_of(offset, TABLE_CHUNK), TABLE_CHUNK)]
        return pltpu.make_async_copy(source, self.ring.at[place], self.ring_arrived.at[place])

    def fetch_chunk(self) -> None:
        """Starts the copy of the next chunk of block table, if there is one."""
        row, index = self.walk[CHUNK_ROW], self.walk[CHUNK_INDEX]

        @pl.when(row < self.end_row)
        def _() -> None:
            fetched = self.walk[CHUNKS_FETCHED]
            self.chunk_copy(self.tables[row] * self.width + index * TABLE_CHUNK, fetched).start()
            is_last = (index + 1) * TABLE_CHUNK >= self.end_page(row)
            next_row = self.real_row(row + 1)
            self.walk[CHUNKS_FETCHED] = fetched + 1
            self.walk[CHUNK_ROW] = jnp.where(is_last, next_row, row)
            self.walk[CHUNK_INDEX] = jnp.where(is_last, lax.div(self.first_page(next_row), TABLE_CHUNK), index + 1)

    def page_copies(self, page_id: Array, buffer: Array, slot: Array) -> list[Any]:
        """Of a page, and of its scales where it has any; both of all KV heads."""
        place = pl.ds(pl.multiple_of(slot * self.page_size, self.page_size), self.page_size)
        arrived = self.step_arrived.at[buffer]
        copies = [pltpu.make_async_copy(self.kv_hbm.at[page_id], self.buffers.at[buffer, :, place], arrived)]
        if self.scales_hbm is not None and self.scale_buffers is not None:
            here = self.scale_buffers.at[buffer, :, :, place]
            copies.append(pltpu.make_async_copy(self.scales_hbm.at[page_id], here, arrived))
        return copies

    def fetch(self, buffer: Array) -> Array:
        """Starts the copies of the next step; returns the program that it belongs to.

        A step ends with its program's last row. Where no row is left, the step is empty and nobody's.
        """
        first_row = self.walk[ROW]
        owner = lax.div(first_row, self.rows)
        limit = jnp.minimum((owner + 1) * self.rows, self.end_row)

        def segment(state: tuple[Array, ...]) -> tuple[Array, ...]:
            slots, row, page, chunk, count = state
            entry = lax.rem(page, TABLE_CHUNK)

            @pl.when((entry == 0) | (page == self.first_page(row)))
            def _() -> None:
                self.chunk_copy(jnp.int32(0), chunk).wait()

            end = self.end_page(row)
            pages = jnp.minimum(jnp.minimum(self.step_pages - slots, end - page), TABLE_CHUNK - entry)
            for field, value in enumerate((slots, row, page)):
                self.segments[buffer, 3 * count + field] = value

            def copy(i: Array, _: None) -> None:
                page_id = self.ring[lax.rem(chunk, RING), entry + i]
                self.page_ids[buffer, slots + i] = page_id
                for part in self.page_copies(page_id, buffer, slots + i):
                    part.start()

            lax.fori_loop(0, pages, copy, None)
            row_done = page + pages == end
            chunk_done = row_done | (entry + pages == TABLE_CHUNK)
            pl.when(chunk_done)(self.fetch_chunk)
            next_row = self.real_row(row + 1)
            return (
                slots + pages,
                jnp.where(row_done, next_row, row),
                jnp.where(row_done, self.first_page(next_row), page + pages),
                chunk + chunk_done.astype(jnp.int32),
                count + 1,
            )

        def has_room(state: tuple[Array, ...]) -> Array:
            return (state[0] < self.step_pages) & (state[1] < limit)

        state: tuple[Array, ...] = (jnp.int32(0), first_row, self.walk[PAGE], self.walk[CHUNK], jnp.int32(0))
        state = lax.while_loop(has_room, segment, state)
        slots, self.walk[ROW], self.walk[PAGE], self.walk[CHUNK], count = state
        self.counts[buffer, 0], self.counts[buffer, 1] = count, slots
        return owner

    def wait(self, buffer: Array) -> None:
        """Returns once all pages of the step are in the buffer."""
        pages = self.counts[buffer, 1]
        is_full = pages == self.step_pages

        @pl.when(is_full)  # a semaphore counts bytes: one wait serves for all copies
        def _() -> None:
            for buffers in (self.buffers, self.scale_buffers):
                if buffers is not None:
                    whole = buffers.at[buffer]
                    pltpu.make_async_copy(whole, whole, self.step_arrived.at[buffer]).wait()

        def one_by_one(i: Array, _: None) -> None:
            for part in self.page_copies(jnp.int32(0), buffer, i):
                part.wait()

        lax.fori_loop(0, jnp.where(is_full, 0, pages), one_by_one, None)

    def num_segments(self, buffer: Array) -> Array:
        return self.counts[buffer, 0]

    def segment(self, buffer: Array, i: Array) -> tuple[Array, Array, Array, Array]:
        """The segment's first slot, the slot after its last, its row, and the page in its first slot."""
        slot, row, page = (self.segments[buffer, 3 * i + field] for field in range(3))
        is_last = i + 1 == self.counts[buffer, 0]
        following = self.segments[buffer, 3 * jnp.minimum(i + 1, self.step_pages - 1)]
        return slot, jnp.where(is_last, self.counts[buffer, 1], following), row, page

    def line(self, buffer: Array, first: Scalar, end: Scalar) -> Array:
        """Coordinates of a step's keys, int32[1, keys]; -1 for all that lie outside the segments [first, end)."""
        key = lax.broadcasted_iota(jnp.int32, (1, self.buffers.shape[2]), 1)

        def place(i: Array, line: Array) -> Array:
            slot, end_slot, row, page = self.segment(buffer, i)
            inside = (key >= slot * self.page_size) & (key < end_slot * self.page_size)
            return jnp.where(inside, key + lax.rem(row, self.rows) * SPAN + (page - slot) * self.page_size, line)

        return lax.fori_loop(first, end, place, jnp.full_like(key, -1))

    def silence_slot(self, buffer: Array, slot: Array, first: Scalar, end: Scalar) -> None:
        """Zeroes a page's keys outside [first, end): what was never written may be NaN, and 0 times NaN is NaN."""
        place = pl.ds(pl.multiple_of(slot * self.page_size, self.page_size), self.page_size)
        page = self.buffers[buffer, :, place]
        key = lax.broadcasted_iota(jnp.int32, page.shape, 1)
        self.buffers[buffer, :, place] = jnp.where((key >= first) & (key < end), page, 0)

    def silence(self, buffer: Array, first: Scalar, end: Scalar) -> None:
        """Zeroes what the segments [first, end) of a step hold beyond their rows' keys, and its empty slots."""

        def edges(i: Array, _: None) -> None:
            slot, end_slot, row, page = self.segment(buffer, i)
            before = self.first_visible(row) - page * self.page_size
            after = self.lengths[row] - (page + end_slot - 1 - slot) * self.page_size

            pl.when(before > 0)(lambda: self.silence_slot(buffer, slot, before, self.page_size))
            pl.when(after < self.page_size)(lambda: self.silence_slot(buffer, end_slot - 1, 0, after))

        def empty(slot: Array, _: None) -> None:
            self.silence_slot(buffer, slot, 0, 0)

        lax.fori_loop(first, end, edges, None)
        lax.fori_loop(self.counts[buffer, 1], self.step_pages, empty, None)

    def keep_only(self, buffer: Array, segment: Array) -> None:
        """Fetches one segment of a step again and zeroes all others."""
        first, end, _, _ = self.segment(buffer, segment)

        def slot_again(slot: Array, _: None) -> None:
            is_kept = (slot >= first) & (slot < end)

            @pl.when(is_kept)
            def fetch_again() -> None:
                for part in self.page_copies(self.page_ids[buffer, slot], buffer, slot):
                    part.start()
                    part.wait()

            pl.when(~is_kept)(lambda: self.silence_slot(buffer, slot, 0, 0))

        lax.fori_loop(0, self.counts[buffer, 1], slot_again, None)
        self.silence(buffer, segment, segment + 1)
