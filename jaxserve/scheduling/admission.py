"""Which requests may enter the queue, and which have waited or run too long; does not know who is served when."""

import heapq
import itertools
from collections.abc import Sequence
from typing import Literal

from jaxserve.config import SchedulerSection
from jaxserve.errors import DeadlineError, QueueFullError, TenantLimitError
from jaxserve.request import SamplingParams
from jaxserve.scheduling.plan import Request
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.simulation.step_times import StepTimes

# Under these policies whoever waits is served before a newcomer, so that their prompts stand between it and its token.
_IN_ORDER = ("fcfs", "static", "dynamic")
TIDY_AT = 256  # entries


class Admission:
    """The limits of one scheduler's queue. The checks only read counts, so they may be called from any thread.

    Args:
      step_times: to predict whether a deadline can be met; None: nothing is predicted.
      block_q, max_prefill_blocks: as the scheduler has them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: SchedulerSection,
        *,
        step_times: StepTimes | None,
        page_size: int,
        block_q: int,
        max_prefill_blocks: int,
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._step_times = step_times
        self._page_size = page_size
        self._block_q = block_q
        self._max_prefill_blocks = max_prefill_blocks

    def check_room(self, prompt_lengths: Sequence[int], tenant: str, *, coming: Sequence[tuple[int, str]] = ()) -> None:
        """Raises QueueFullError unless all these prompts may be queued.

        Args:
          coming: length and tenant of prompts that were let in before, but are not in the queue yet.
        """
        scheduler, config = self._scheduler, self._config
        # Free slots take their requests out of the queue in the next step.
        others = max(0, scheduler.num_waiting + len(coming) - scheduler.num_free_slots)
        queued = max(0, scheduler.num_waiting + len(coming) + len(prompt_lengths) - scheduler.num_free_slots)
        limit = config.max_queued_requests
        if limit is not None and queued > limit:
            raise QueueFullError(
                f"{others} requests wait already; with {len(prompt_lengths)} more the limit of {limit} would be passed "
                "(scheduler.max_queued_requests)"
            )
        limit = config.max_queued_tokens
        tokens = scheduler.waiting_tokens + sum(length for length, _ in coming)
        # A prompt that is longer than the limit by itself can still be served, when nobody waits.
        if limit is not None and others and tokens + sum(prompt_lengths) > limit:
            raise QueueFullError(
                f"prompts of {tokens} tokens wait already; with {sum(prompt_lengths)} more the limit of {limit} would "
                "be passed (scheduler.max_queued_tokens)"
            )
        limit = config.max_queued_per_tenant
        of_tenant = scheduler.waiting_of.get(tenant, 0) + sum(name == tenant for _, name in coming)
        if limit is not None and of_tenant + len(prompt_lengths) > limit:
            raise TenantLimitError(
                f"{of_tenant} requests of tenant {tenant!r} wait already; with {len(prompt_lengths)} more the limit of "
                f"{limit} would be passed (scheduler.max_queued_per_tenant)"
            )

    def check_deadline(self, prompt_length: int, num_cached: int, params: SamplingParams) -> None:
        """Raises DeadlineError if even the first token is not to be expected in time.

        Args:
          num_cached: prompt tokens that need not be computed.
        """
        if params.deadline_ms is None or self._step_times is None:
            return
        expected_ms = 1000 * self._time_to_first_token_s(prompt_length - num_cached, self._step_times)
        if expected_ms > params.deadline_ms:
            raise DeadlineError(
                f"deadline_ms is {params.deadline_ms}, but the first token is expected after {expected_ms:.0f} ms: "
                f"{self._scheduler.num_waiting} requests wait and {len(self._scheduler.running)} run"
            )

    def _time_to_first_token_s(self, tokens: int, step_times: StepTimes) -> float:
        scheduler = self._scheduler
        tokens += sum(request.prefill_end - request.num_computed for request in list(scheduler.running))
        if self._config.policy in _IN_ORDER:
            hit_rate = scheduler.num_prefix_hits / max(1, scheduler.num_prefix_queries)
            tokens += int(scheduler.waiting_tokens * max(0.0, 1 - hit_rate))
        blocks = -(-tokens // self._block_q)
        full_steps, rest = divmod(blocks, self._max_prefill_blocks)
        rows = len(scheduler.running)
        keys = scheduler.pool.num_active * self._page_size
        seconds = full_steps * step_times.estimate(rows, self._max_prefill_blocks, keys) if full_steps else 0.0
        return seconds + (step_times.estimate(rows, rest, keys) if rest else 0.0)


class Deadlines:
    """Who has to end when."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Literal["deadline", "queue"], Request]] = []
        self._pushes = itertools.count()
        self._tidy_at = TIDY_AT

    def add(self, request: Request) -> None:
        """Notes the deadlines of a request that has just arrived."""
        if len(self._heap) >= self._tidy_at:  # those who ended long before their deadline would stay until then
            self._heap = [entry for entry in self._heap if entry[3].finish_reason is None]
            heapq.heapify(self._heap)
            self._tidy_at = max(TIDY_AT, 2 * len(self._heap))
        params = request.params
        if params.deadline_ms is not None:
            self._push(request, "deadline", params.deadline_ms)
        if params.queue_timeout_ms is not None:
            self._push(request, "queue", params.queue_timeout_ms)

    def due(self, now: float) -> list[Request]:
        """Requests whose time is up, each once, except those that have ended or, of the queue, have left it."""
        requests: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, request = heapq.heappop(self._heap)
            has_begun = request.residence >= 0
            if request.finish_reason is None and request not in requests and not (kind == "queue" and has_begun):
                requests.append(request)
        return requests

    def __len__(self) -> int:
        """Entries, of ended requests too."""
        return len(self._heap)

    def _push(self, request: Request, kind: Literal["deadline", "queue"], milliseconds: int) -> None:
        heapq.heappush(self._heap, (request.arrival_time + milliseconds / 1000, next(self._pushes), kind, request))
