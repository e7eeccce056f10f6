"""Takes a picture of the scheduler between two steps, for whoever watches; changes nothing, and copies little.

It is taken on the engine's thread while a step may be in flight, so it only gathers references and short lists: what
can be worked out from them later, on another thread, is.
"""

from dataclasses import dataclass

from jaxserve.scheduling.plan import Request
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_history import StepHistory, StepRecord
from jaxserve.scheduling.tree_outline import TreeLine, outline

MAX_WAITING = 24
MAX_SORTED = 1024  # a longer queue is counted and not listed: to list it is to sort it


@dataclass(frozen=True, kw_only=True, slots=True)
class PicturedRequest:
    """One request. `number` is that of its arrival; `computed` of its `tokens` have their keys and values.

    Attributes:
      slot: None while it waits.
      max_length: tokens, prompt and output, at which it ends for length.
    """

    number: int
    request_id: str
    slot: int | None
    prompt_tokens: int
    tokens: int
    computed: int
    max_length: int
    cached_tokens: int
    preemptions: int
    is_prefilling: bool
    pages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """The scheduler at one moment.

    Attributes:
      num_pages: without the dummy; their ids are 1 to num_pages.
      kept_pages: those that the prefix cache knows, held or not.
      waiting: the first of the queue; empty where that is too long to be sorted.
      steps: the last ones, oldest first.
    """

    page_size: int
    num_pages: int
    max_num_seqs: int
    kept_pages: tuple[int, ...]
    running: tuple[PicturedRequest, ...]
    waiting: tuple[PicturedRequest, ...]
    steps: tuple[StepRecord, ...]
    tree: tuple[TreeLine, ...]


def take_picture(scheduler: Scheduler, history: StepHistory, page_size: int) -> Picture:
    cache = scheduler.cache
    queued = scheduler.queued()[:MAX_WAITING] if scheduler.num_waiting <= MAX_SORTED else []
    return Picture(
        page_size=page_size,
        num_pages=scheduler.pool.total,
        max_num_seqs=len(scheduler.running) + scheduler.num_free_slots,
        kept_pages=cache.kept_pages(),
        running=tuple(_pictured(request) for request in scheduler.running),
        waiting=tuple(_pictured(request) for request in queued),
        steps=history.steps(),
        tree=outline(cache.roots(), scheduler.pool.num_holders),
    )


def _pictured(request: Request) -> PicturedRequest:
    return PicturedRequest(
        number=request.arrival,
        request_id=request.request_id,
        slot=request.slot if request.slot >= 0 else None,
        prompt_tokens=request.prompt_len,
        tokens=len(request.token_ids),
        computed=request.num_computed,
        max_length=request.max_length,
        cached_tokens=request.num_cached_tokens,
        preemptions=request.num_preemptions,
        is_prefilling=request.is_prefilling,
        pages=tuple(request.pages),
    )
