"""Owns the waiting and running queues and the token budget of a step; knows neither jax nor text.

Every iteration is scheduled anew (Orca, Yu et al. 2022). Running requests decode first, one token each; what is left
of the budget goes to prompts, in blocks, first come first served, and a long prompt takes several steps (chunked
prefill, Sarathi, Agrawal et al. 2023). When pages run out, the newest running request gives up its own and is
computed again later (recompute preemption, Kwon et al. 2023).
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

from jaxserve.constraints import TokenConstraints
from jaxserve.page_pool import PagePool
from jaxserve.request import FinishReason, SamplingParams


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One sequence, from its arrival to its end.

    Attributes:
      token_ids: prompt and output, as far as the host has read it.
      max_length: tokens, prompt and output, at which it ends for length.
      end_token_ids: tokens that end it: end-of-sequence (unless ignored) and its stop tokens.
      pages: held pages, in order of position. `num_computed` tokens have their keys and values there, or will have when
        the steps in flight end.
      prefill_end: tokens to compute as prompt in this residence; a resumed request recomputes its output too.
      num_in_flight: sampled tokens that the host has not read yet.
      residence: a number that no other stay of any request in a slot has.
    """

    request_id: str
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    max_length: int
    end_token_ids: frozenset[int]
    constraints: TokenConstraints | None
    slot: int = -1
    residence: int = -1
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    prefill_end: int = 0
    num_in_flight: int = 0
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens, the ones in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_end


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Prompt tokens start to start + count of one request, computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.request.prefill_end

    def num_blocks(self, block_q: int) -> int:
        return -(-self.count // block_q)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A request that samples in this step, and the position that its new token will have."""

    request: Request
    position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step. `samples` lists the decodes first, then the chunks that end their prompts, in order."""

    decodes: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    samples: tuple[Sample, ...]


class Scheduler:
    """First come, first served.

    Args:
      max_num_seqs: requests with a slot at once.
      max_num_batched_tokens: decode rows plus prompt tokens of a step, padding of the blocks included.
      block_q: tokens of a prefill block.
      max_prefill_blocks: blocks that the largest compiled step has.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_q: int,
        max_prefill_blocks: int,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._page_size = page_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_q = block_q
        self._max_prefill_blocks = max_prefill_blocks
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._residences = itertools.count()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Plan | None:
        """The next step, or None if nothing can run before tokens in flight are read."""
        decodes, preempted = self._schedule_decodes()
        blocks_left = min(self._max_prefill_blocks, (self._max_num_batched_tokens - len(decodes)) // self._block_q)
        chunks: list[Chunk] = []
        for request in self.running:
            if request.is_prefilling and blocks_left > 0:
                blocks_left -= self._take_chunk(request, blocks_left, chunks)
        # A step that had to take pages away has none to give; its victims come back when pages do.
        while self.waiting and blocks_left > 0 and not preempted and self._admit(self.waiting[0]):
            blocks_left -= self._take_chunk(self.waiting.popleft(), blocks_left, chunks)
        if not decodes and not chunks:
            return None
        samplers = itertools.chain(decodes, (chunk.request for chunk in chunks if chunk.is_last))
        samples = tuple(Sample(request=request, position=request.length) for request in samplers)
        for sample in samples:
            sample.request.num_in_flight += 1
        return Plan(decodes=tuple(decodes), chunks=tuple(chunks), samples=samples)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request wherever it is; its pages and slot are free at once."""
        assert request.finish_reason is None, request.request_id
        request.finish_reason = reason
        if request.slot >= 0:
            self.running.remove(request)
            self._vacate(request)
        else:
            self.waiting.remove(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages, slots and queues agree."""
        assert all(request.slot >= 0 for request in self.running)
        assert all(request.slot < 0 and not request.pages for request in self.waiting)
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots) == list(range(len(slots))), f"slots are {sorted(slots)}"
        self.pool.check_integrity({request.request_id: request.pages for request in self.running})

    def _schedule_decodes(self) -> tuple[list[Request], bool]:
        decodes: list[Request] = []
        preempted = False
        for request in list(self.running):
            if request.slot < 0 or request.is_prefilling or request.length >= request.max_length:
                continue  # preempted just now, still in its prompt, or its last token is in flight
            if request.num_in_flight and request.constraints and request.constraints.needs_every_token:
                continue
            if request.num_computed == len(request.pages) * self._page_size:
                while not self.pool.num_free and request.slot >= 0:
                    self._preempt(self.running[-1])
                    preempted = True
                if request.slot < 0:
                    continue
                request.pages += self.pool.allocate(1)
            request.num_computed += 1
            decodes.append(request)
        return decodes, preempted

    def _take_chunk(self, request: Request, blocks_left: int, chunks: list[Chunk]) -> int:
        """Schedules what fits of the request's prompt; returns the blocks it takes."""
        count = min(request.prefill_end - request.num_computed, blocks_left * self._block_q)
        chunk = Chunk(request=request, start=request.num_computed, count=count)
        chunks.append(chunk)
        request.num_computed += count
        return chunk.num_blocks(self._block_q)

    def _admit(self, request: Request) -> bool:
        """Gives the request a slot and the pages of all its known tokens, if both are there."""
        assert not request.num_in_flight, request.request_id
        needed = -(-len(request.token_ids) // self._page_size)
        # Each running request may want its next page soon; without that much left over, the newcomer would be the
        # first to be preempted.
        if not self._free_slots or needed + len(self.running) > self.pool.num_free:
            return False
        request.slot = self._free_slots.pop()
        request.residence = next(self._residences)
        request.pages = self.pool.allocate(needed)
        request.prefill_end = len(request.token_ids)
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        """Takes the newest request's pages. Its tokens stay, one in flight arrives later, and it is next in line."""
        self.num_preemptions += 1
        self.running.remove(request)
        self._vacate(request)
        self.waiting.appendleft(request)

    def _vacate(self, request: Request) -> None:
        self.pool.release(request.pages)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.pages = []
        request.num_computed = request.prefill_end = 0
