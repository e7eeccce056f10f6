"""Owns who runs, in which slot and on which pages, and fills the token budget of a step; knows neither jax nor text.

Every iteration is scheduled anew (Orca, Yu et al. 2022). Running requests decode first, one token each; what is left
of the budget goes to prompts, in blocks, and a long prompt takes several steps (chunked prefill, Sarathi, Agrawal et
al. 2023). Who comes in next is for a policy to say, whether it fits for the reservation, and what it need not compute
for the prefix cache. When pages run out, whoever ranks last gives up its own and is computed again later (recompute
preemption, Kwon et al. 2023).
"""

import itertools
import sys
from collections import Counter, deque
from collections.abc import Sequence

from jaxserve.clock import Clock, MachineClock
from jaxserve.request import FinishReason
from jaxserve.scheduling.plan import Chunk, Plan, Request
from jaxserve.scheduling.policies import Fcfs
from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.reservation import Reservation

_RESIDENCES = itertools.count()  # of the whole process: a device may be handed from one scheduler to the next


class Scheduler:
    """Decides each step.

    Args:
      cache: the pages, and what is known to be in them.
      policy: owns the waiting requests.
      page_size: tokens of a page.
      max_num_seqs: requests with a slot at once.
      max_num_batched_tokens: decode rows plus prompt tokens of a step, padding of the blocks included.
      block_q: tokens of a prefill block.
      max_prefill_blocks: blocks that the largest compiled step has.
      max_chunk_blocks: blocks that one prompt may take in a step, so that shorter ones run beside it.
      max_consecutive_prefills: steps with prompts in a row while others decode, before one without; None: any number.
      max_running_per_tenant: requests of one tenant with a slot at once. None: any number.
      max_restored_pages, max_saved_pages: that come from host memory, or go there, in a step in which others decode.
    """

    def __init__(
        self,
        cache: PrefixCache,
        policy: Fcfs,
        reservation: Reservation,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_q: int,
        max_prefill_blocks: int,
        max_chunk_blocks: int | None = None,
        max_consecutive_prefills: int | None = None,
        max_running_per_tenant: int | None = None,
        max_restored_pages: int = sys.maxsize,
        max_saved_pages: int = sys.maxsize,
        clock: Clock | None = None,
    ) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.waiting = policy
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queries = self.num_prefix_hits = 0  # prompt tokens looked up and found
        self._reservation = reservation
        self._page_size = page_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_q = block_q
        self._max_prefill_blocks = max_prefill_blocks
        self._max_chunk_blocks = max_chunk_blocks or max_prefill_blocks
        self._max_consecutive_prefills = max_consecutive_prefills
        self._max_running_per_tenant = max_running_per_tenant
        self._max_restored_pages = max_restored_pages
        self._max_saved_pages = max_saved_pages
        self._restores_left = 0  # in this step
        self._clock = clock or MachineClock()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = itertools.count()
        self._num_prefilling = 0
        self._consecutive_prefills = 0
        self._pages_later = 0  # that the running requests will still want, at their longest
        self.unused_slots = 0  # places in the running requests' pages that hold no token; shared pages are full
        self.num_waiting = self.waiting_tokens = 0
        self.waiting_of: Counter[str] = Counter()  # by tenant
        self._running_of: Counter[str] = Counter()
        self._set_aside: dict[str, deque[Request]] = {}  # by tenant: candidates that came while it had enough running

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def queued(self) -> list[Request]:
        """All requests without a slot."""
        return [*self.waiting, *itertools.chain.from_iterable(self._set_aside.values())]

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        request.arrival_time = self._clock.now()
        self._enqueue(request)

    def schedule(self) -> Plan | None:
        """The next step, or None if nothing can run before tokens in flight are read, or the policy waits."""
        others_decode = len(self.running) > self._num_prefilling  # who would wait for the copies
        self._restores_left = self._max_restored_pages if others_decode else sys.maxsize
        self.cache.host.max_saves = self._max_saved_pages if others_decode else sys.maxsize
        decodes, preempted = self._schedule_decodes()
        chunks = self._schedule_prompts(len(decodes), may_admit=not preempted)
        if not decodes and not chunks:
            return None
        if not preempted:
            self._reservation.on_step()
        self._consecutive_prefills = self._consecutive_prefills + 1 if chunks else 0
        beginning = [chunk.request for chunk in chunks if chunk.is_last]
        for request in beginning:
            request.num_in_flight += 1
        samples = (*decodes, *beginning)
        return Plan(
            decodes=tuple(decodes),
            chunks=tuple(chunks),
            samples=samples,
            positions=tuple([request.num_computed for request in samples]),  # each token before it is computed by now
            copies=self.cache.take_copies(),
        )

    def append(self, samples: Sequence[Request], token_ids: Sequence[int]) -> list[FinishReason | None]:
        """Takes the tokens that a step sampled, as the host has read them: one for each request of `Plan.samples`.

        Returns:
          Why each request has to end with its token, or None. One that ended while the step was in flight takes none.
        """
        page_size = self._page_size
        reasons: list[FinishReason | None] = []
        for request, token_id in zip(samples, token_ids, strict=True):
            request.num_in_flight -= 1
            reason: FinishReason | None = None
            if request.finish_reason is None:
                known = request.token_ids
                known.append(token_id)
                length = len(known)
                if request.prefix is None:
                    self.waiting_tokens += 1  # it was preempted with this token in flight
                elif length % page_size == 0:
                    self._share(request)
                if token_id in request.end_token_ids:
                    reason = "stop"
                elif length == request.max_length:
                    reason = "length"
            reasons.append(reason)
        self.waiting.on_output_tokens(samples)
        return reasons

    def finish(self, request: Request, reason: FinishReason, *, keep_pages: bool = True) -> None:
        """Ends a request wherever it is; its pages and slot are free at once.

        Args:
          keep_pages: False where its keys and values are not to be trusted: nobody will find them in the cache.
        """
        assert request.finish_reason is None, request.request_id
        request.finish_reason = reason
        if request.slot >= 0:
            if request.prefix is not None:
                if keep_pages:
                    self._share(request)
                else:
                    self.cache.discard(request.prefix)
            self._vacate(request)
            return
        self._count_waiting(request, -1)
        set_aside = self._set_aside.get(request.params.tenant)
        if set_aside is not None and request in set_aside:
            set_aside.remove(request)
        else:
            self.waiting.remove(request)
            self._bring_back_one(request.params.tenant)

    def cached_tokens(self, request: Request) -> int:
        """Tokens that a waiting request would not have to compute if it came in now."""
        if not request.may_skip_cached:
            return 0
        return len(self.cache.match(request.root, request.token_ids)) * self._page_size

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages, slots, queues and counts agree."""
        assert all(request.slot >= 0 for request in self.running)
        assert all(request.slot < 0 and not request.pages for request in self.queued())
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots) == list(range(len(slots))), f"slots are {sorted(slots)}"
        self.cache.check_integrity({request.request_id: request.pages for request in self.running})
        assert self._num_prefilling == sum(request.is_prefilling for request in self.running)
        later = sum(request.pages_to_completion(self._page_size) - len(request.pages) for request in self.running)
        assert self._pages_later == later, (self._pages_later, later)
        unused = sum(request.unused_slots(self._page_size) for request in self.running)
        assert self.unused_slots == unused, (self.unused_slots, unused)
        tenants = [request.params.tenant for request in self.running]
        assert self._running_of == Counter(tenants)
        queued = self.queued()
        assert self.num_waiting == len(queued)
        assert self.waiting_tokens == sum(len(request.token_ids) for request in queued)
        assert self.waiting_of == Counter(request.params.tenant for request in queued)

    # --- one step ---

    def _schedule_decodes(self) -> tuple[list[Request], bool]:
        decodes: list[Request] = []
        preempted = False
        page_size = self._page_size
        for request in self.running[:]:
            num_computed = request.num_computed
            if num_computed < request.prefill_end or request.slot < 0:
                continue  # still in its prompt, or preempted just now
            if num_computed + 1 >= request.max_length:
                continue  # its last token is in flight
            if request.constraints is not None and request.num_in_flight and request.constraints.needs_every_token:
                continue
            if num_computed % page_size == 0 and num_computed == len(request.pages) * page_size:
                while not self.cache.available and request.slot >= 0:
                    self._preempt(max(self.running, key=lambda r: (self.waiting.rank(r), r.arrival)), decodes)
                    preempted = True
                if request.slot < 0:
                    continue
                request.pages += self.cache.allocate(1)
                self._pages_later -= 1
                self.unused_slots += page_size
            request.num_computed = num_computed + 1
            request.num_in_flight += 1
            decodes.append(request)
        self.unused_slots -= len(decodes)
        return decodes, preempted

    def _schedule_prompts(self, num_decodes: int, *, may_admit: bool) -> list[Chunk]:
        """Fills what decodes left of the step: first prompts that have begun, then newcomers."""
        chunks: list[Chunk] = []
        limit = self._max_consecutive_prefills
        if limit is not None and num_decodes and self._consecutive_prefills >= limit:
            return chunks
        blocks_left = min(self._max_prefill_blocks, (self._max_num_batched_tokens - num_decodes) // self._block_q)
        if self._num_prefilling:
            for request in self.running:
                if request.is_prefilling and blocks_left > 0:
                    blocks_left -= self._take_chunk(request, blocks_left, chunks)
        # A step that had to take pages away has none to give; its victims come back when pages do.
        if may_admit and blocks_left > 0 and self._free_slots:
            self.waiting.begin_step(self._clock.now(), len(self.running))
        while may_admit and blocks_left > 0 and self._free_slots:
            request_or_none = self._next_candidate()
            if request_or_none is None or not self._admit(request_or_none):
                break
            blocks_left -= self._take_chunk(request_or_none, blocks_left, chunks)
        return chunks

    def _take_chunk(self, request: Request, blocks_left: int, chunks: list[Chunk]) -> int:
        """Schedules what fits of the request's prompt; returns the blocks it takes."""
        if not self._skip_cached(request):
            return 0
        blocks = min(blocks_left, self._max_chunk_blocks)
        count = min(request.prefill_end - request.num_computed, blocks * self._block_q)
        chunk = Chunk(request=request, start=request.num_computed, count=count)
        chunks.append(chunk)
        request.num_computed += count
        self.unused_slots -= count
        self._num_prefilling -= chunk.is_last
        self._share(request)
        return chunk.num_blocks(self._block_q)

    def _next_candidate(self) -> Request | None:
        """The policy's candidate whose tenant may have one more running; those before it are set aside."""
        while (request := self.waiting.candidate()) is not None:
            tenant = request.params.tenant
            if self._max_running_per_tenant is None or self._running_of[tenant] < self._max_running_per_tenant:
                return request
            self.waiting.remove(request)
            self._set_aside.setdefault(tenant, deque()).append(request)
        return None

    # --- who runs ---

    def _admit(self, request: Request) -> bool:
        """Gives the request a slot and the pages of all its known tokens, those in the cache and new ones.

        What the cache has in host memory comes back to new ones, as the first of its prompt is scheduled.
        """
        assert not request.num_in_flight, request.request_id
        matched = self.cache.match(request.root, request.token_ids) if request.may_skip_cached else []
        num_pages = -(-len(request.token_ids) // self._page_size)
        on_device = [node for node in matched if node.host_page is None]
        num_new = num_pages - len(on_device)
        pages_later = request.pages_to_completion(self._page_size) - num_pages
        if not self._reservation.fits(
            pages_now=num_new + sum(not self.pool.is_held(node.page) for node in on_device),
            pages_later=self._pages_later + pages_later,
            available=self.cache.available,
            num_running=len(self.running),
        ):
            return False
        self._count_waiting(request, -1)
        self.waiting.on_admitted(request)
        request.slot = self._free_slots.pop()
        request.residence = next(_RESIDENCES)
        request.prefix, request.pages = self.cache.open(request.root, matched)
        request.pages += self.cache.allocate(num_new)
        request.stale_from = 0
        request.prefill_end = len(request.token_ids)
        request.num_computed = len(on_device) * self._page_size
        if not request.num_preemptions:
            self.num_prefix_queries += request.prompt_len
            self._count_cached(request, request.num_computed)
        self._pages_later += pages_later
        self.unused_slots += num_new * self._page_size
        self._num_prefilling += 1
        self._running_of[request.params.tenant] += 1
        self.running.append(request)
        return True

    def _preempt(self, request: Request, decodes: list[Request]) -> None:
        """Takes a request's pages. Its tokens stay, one in flight arrives later, and it keeps its place in line."""
        if request in decodes:  # its turn in this step is taken back
            decodes.remove(request)
            request.num_computed -= 1
            request.num_in_flight -= 1
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._reservation.on_preemption()
        self._vacate(request)
        self._enqueue(request)

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.pages)
        self._pages_later -= request.pages_to_completion(self._page_size) - len(request.pages)
        self.unused_slots -= request.unused_slots(self._page_size)
        self._num_prefilling -= request.is_prefilling
        self._free_slots.append(request.slot)
        request.slot = -1
        request.pages = []
        request.prefix = None
        request.num_computed = request.prefill_end = 0
        tenant = request.params.tenant
        self._running_of[tenant] -= 1
        if not self._running_of[tenant]:
            del self._running_of[tenant]
        self._bring_back_one(tenant)

    def _enqueue(self, request: Request) -> None:
        self._count_waiting(request, 1)
        self.waiting.add(request)

    def _count_waiting(self, request: Request, change: int) -> None:
        self.num_waiting += change
        self.waiting_tokens += change * len(request.token_ids)
        tenant = request.params.tenant
        self.waiting_of[tenant] += change
        if not self.waiting_of[tenant]:
            del self.waiting_of[tenant]

    def _bring_back_one(self, tenant: str) -> None:
        """Lets the next request that was set aside for its tenant be a candidate again."""
        set_aside = self._set_aside.get(tenant)
        if set_aside:
            self.waiting.add(set_aside.popleft())
        if set_aside is not None and not set_aside:
            del self._set_aside[tenant]

    # --- the cache ---

    def _share(self, request: Request) -> None:
        """Puts full pages into the cache: those computed by steps dispatched so far, of tokens that are known."""
        assert request.prefix is not None
        full = min(request.num_computed, len(request.token_ids)) // self._page_size
        if full > request.prefix.depth:
            changed = self.cache.insert(request.prefix, request.token_ids, request.pages, full)
            if changed is not None:
                request.stale_from = min(request.stale_from, changed)

    def _skip_cached(self, request: Request) -> bool:
        """Skips pages that other requests have computed while this one waited for its turn in the budget, and those
        that come back from host memory. False: some of these wait for the next step, and the request for them."""
        prefix = request.prefix
        assert prefix is not None
        if not request.may_skip_cached or prefix.depth * self._page_size != request.num_computed:
            return True
        before, restored = prefix.depth, self.cache.host.num_restored
        end = (request.prefill_end - 1) // self._page_size
        is_done = self.cache.follow(prefix, request.token_ids, request.pages, end, max_restored=self._restores_left)
        self._restores_left -= self.cache.host.num_restored - restored
        depth = prefix.depth
        if depth > before:
            request.stale_from = min(request.stale_from, before)
            request.num_computed = depth * self._page_size
            self.unused_slots -= (depth - before) * self._page_size
            if not request.num_preemptions:
                self._count_cached(request, (depth - before) * self._page_size)
        return is_done

    def _count_cached(self, request: Request, count: int) -> None:
        request.num_cached_tokens += count
        self.num_prefix_hits += count
