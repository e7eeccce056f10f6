"""Who is next: each policy owns the waiting requests and names one candidate at a time; none knows pages or steps.

Whether the candidate fits is not asked here (`reservation`), and nobody overtakes a candidate that does not fit yet, so
whoever a policy names first is served first. A preempted request comes back to its old place.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxserve.scheduling.plan import Request

# A prompt token costs its tenant one, an output token two, as in the paper's evaluation (Sheng et al. 2024).
PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0

PREFIX_WINDOW = 32  # oldest requests of which `longest-prefix` chooses
MAX_IDLE_TENANTS = 1024  # whose counters are remembered without need
MAX_OVERTAKEN = 64  # times that the oldest of them may be passed over


class Fcfs:
    """First come, first served; also the queue that the other policies build on."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}
        self._heap: list[tuple[float, int, Request]] = []  # entries of requests that left stay until they come up

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In the order of `rank`."""
        return iter(sorted(self._waiting.values(), key=lambda request: (self.rank(request), request.arrival)))

    def rank(self, request: Request) -> float:
        """Lower is served earlier and preempted later; it does not change while a request lives."""
        return request.arrival

    def add(self, request: Request) -> None:
        """Queues a request that arrived or was preempted."""
        self._waiting[request.request_id] = request
        if len(self._heap) > 2 * len(self._waiting) + 64:  # aborted ones, which may be long in coming up
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.rank(request), request.arrival, request))

    def remove(self, request: Request) -> None:
        """Takes out a request that was admitted, aborted or set aside."""
        del self._waiting[request.request_id]
        if self._heap and self._heap[0][2] is request:
            heapq.heappop(self._heap)  # so that a candidate may come back without standing in it twice

    def begin_step(self, now: float, num_running: int) -> None:
        """Called before the first `candidate` of a step."""

    def candidate(self) -> Request | None:
        """The request to admit next, or None if nobody may come in now."""
        while self._heap:
            request = self._heap[0][2]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def opens_in(self, now: float) -> float:
        """Seconds until `candidate` may name somebody, where requests wait and none runs."""
        return 0.0

    def on_admitted(self, request: Request) -> None:
        self.remove(request)

    def on_output_tokens(self, requests: Sequence[Request]) -> None:
        """Called when a step's tokens are read, with the requests they are for; those that have ended take none."""


class Priority(Fcfs):
    """Lower numbers first; waiting `ageing_s` seconds is worth one step of priority, so nobody waits for ever.

    With ageing as a straight line, the order of two requests never changes while they wait:
    arrival 0 s at priority 1 and arrival 8 s at priority 0 compare as 10 and 8 (`ageing_s` = 10), now and always.
    """

    def __init__(self, ageing_s: float) -> None:
        super().__init__()
        self._ageing_s = ageing_s

    def rank(self, request: Request) -> float:
        return request.arrival_time + request.params.priority * self._ageing_s


class LongestPrefix(Fcfs):
    """Of the oldest waiting requests, those with the most pages in the cache first, before they are evicted.

    Serving shared prefixes next to each other is what makes them hit (SGLang's cache-aware schedule, Zheng et al.
    2024). The window bounds both the search and, with `MAX_OVERTAKEN`, the wait. It is searched once a step.

    Args:
      cached_pages: how many pages of a request are in the cache now.
    """

    def __init__(self, cached_pages: Callable[[Request], int]) -> None:
        super().__init__()
        self._cached_pages = cached_pages
        self._window: list[Request] = []  # the oldest, in order; not in the heap
        self._ranked: list[Request] = []  # of the window, the best last, as it was when it was searched
        self._num_overtaken = 0  # of the window's first

    def add(self, request: Request) -> None:
        if self._window and request.arrival < self._window[-1].arrival:
            self._waiting[request.request_id] = request
            self._window.append(request)
            self._window.sort(key=self.rank)
        else:
            super().add(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if request in self._window:
            if self._window[0] is request:
                self._num_overtaken = 0
            self._window.remove(request)
        if request in self._ranked:
            self._ranked.remove(request)

    def begin_step(self, now: float, num_running: int) -> None:
        self._ranked = []

    def candidate(self) -> Request | None:
        if not self._ranked:
            while len(self._window) < PREFIX_WINDOW and (request := super().candidate()) is not None:
                heapq.heappop(self._heap)
                self._window.append(request)
            best_first = sorted(self._window, key=self._cached_pages, reverse=True)  # of equal ones, the oldest first
            self._ranked = best_first[::-1]
        if not self._ranked:
            return None
        return self._window[0] if self._num_overtaken >= MAX_OVERTAKEN else self._ranked[-1]

    def on_admitted(self, request: Request) -> None:
        if request is not self._window[0]:
            self._num_overtaken += 1
        self.remove(request)


class Fair(Fcfs):
    """The tenant that has been served least comes first (virtual token counter, Sheng et al. 2024).

    Each tenant's counter grows by the cost of its tokens, divided by its weight. A tenant that comes back after a pause
    starts where the least served one stands, so that nobody saves up by staying away.

    Args:
      weights: by tenant; others have 1. Twice the weight is twice the tokens.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._queues: dict[str, list[tuple[int, Request]]] = {}  # heaps by arrival; as in Fcfs, leavers stay
        self._tenants: list[tuple[float, str]] = []  # a heap by counter, which may have grown since
        self._least = 0.0  # counter of the tenant that was served last

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def add(self, request: Request) -> None:
        tenant = request.params.tenant
        self._waiting[request.request_id] = request
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = []
            counter = self._counters[tenant] = max(self.counter(tenant), self._least)
            heapq.heappush(self._tenants, (counter, tenant))
            if len(self._counters) > len(self._queues) + 2 * MAX_IDLE_TENANTS:
                self._forget_idle()
        heapq.heappush(queue, (request.arrival, request))

    def remove(self, request: Request) -> None:
        super().remove(request)
        queue = self._queues[request.params.tenant]
        if queue[0][1] is request:
            heapq.heappop(queue)

    def candidate(self) -> Request | None:
        while self._tenants:
            counter, tenant = self._tenants[0]
            queue = self._queues[tenant]
            while queue and self._waiting.get(queue[0][1].request_id) is not queue[0][1]:
                heapq.heappop(queue)
            if not queue:
                heapq.heappop(self._tenants)
                del self._queues[tenant]
            elif counter < self._counters[tenant]:
                heapq.heapreplace(self._tenants, (self._counters[tenant], tenant))
            else:
                return queue[0][1]
        return None

    def on_admitted(self, request: Request) -> None:
        self.remove(request)
        self._least = max(self._least, self.counter(request.params.tenant))
        if not request.num_preemptions:
            self._charge(request.params.tenant, request.prompt_len * PROMPT_TOKEN_COST)

    def on_output_tokens(self, requests: Sequence[Request]) -> None:
        tokens = Counter([request.params.tenant for request in requests if request.finish_reason is None])
        for tenant, count in tokens.items():
            self._charge(tenant, count * OUTPUT_TOKEN_COST)

    def _forget_idle(self) -> None:
        """Tenants are named from outside, so there may be any number: of those away, the most served are remembered."""
        idle = sorted(self._counters.keys() - self._queues.keys(), key=self.counter)
        for tenant in idle[: len(idle) - MAX_IDLE_TENANTS]:
            del self._counters[tenant]

    def _charge(self, tenant: str, cost: float) -> None:
        self._counters[tenant] = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)


class Batches(Fcfs):
    """A fixed batch at a time, which runs until its longest ends: the baseline that continuous batching is held to.

    With `max_delay_s` 0 a batch is whatever waits when the last one has ended (static batching). With more, it is not
    begun before it is full or its first has waited so long (dynamic batching, as in Triton's batcher).
    """

    def __init__(self, *, batch_size: int, max_delay_s: float) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._max_delay_s = max_delay_s
        self._to_admit = 0  # of the batch that runs

    def add(self, request: Request) -> None:
        super().add(request)
        if request.num_preemptions:
            self._to_admit += 1  # it belongs to the batch that runs, and is first in line

    def begin_step(self, now: float, num_running: int) -> None:
        first = super().candidate()
        if first is not None and num_running == 0:
            is_due = len(self) >= self._batch_size or now - first.arrival_time >= self._max_delay_s
            self._to_admit = min(len(self), self._batch_size) if is_due else 0

    def candidate(self) -> Request | None:
        return super().candidate() if self._to_admit else None

    def opens_in(self, now: float) -> float:
        first = super().candidate()
        return 0.0 if first is None else max(0.0, first.arrival_time + self._max_delay_s - now)

    def on_admitted(self, request: Request) -> None:
        super().on_admitted(request)
        self._to_admit -= 1
