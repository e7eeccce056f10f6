"""Counts what the pages hold: tokens, shared and cached pages, and the slots that hold nothing; changes nothing."""

from dataclasses import dataclass

from jaxserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPages:
    """One running request's pages. `shared_pages` are held by others too; `cached_pages` may be found by newcomers."""

    request_id: str
    tokens: int
    pages: int
    shared_pages: int
    cached_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PageLedger:
    """All pages, without the dummy: `free + cached + active == total`.

    Attributes:
      page_bytes: keys, values and scales of one page in all layers, on all devices together.
      shared: active pages with more than one holder.
      slots: places for tokens in active pages, each page counted once however many hold it.
      unused_slots: of those, the ones that hold no token: the waste of Kwon et al. 2023, who report under 4 %.
      host_total, host_held: pages that host memory may hold beside these, and holds.
    """

    page_size: int
    page_bytes: int
    total: int
    free: int
    cached: int
    active: int
    shared: int
    slots: int
    unused_slots: int
    host_total: int
    host_held: int
    requests: tuple[RequestPages, ...]

    @property
    def waste(self) -> float:
        return self.unused_slots / self.slots if self.slots else 0.0


def page_ledger(scheduler: Scheduler, page_size: int, page_bytes: int) -> PageLedger:
    """The pages as the steps dispatched so far leave them."""
    pool = scheduler.pool
    requests = tuple(
        RequestPages(
            request_id=request.request_id,
            tokens=request.num_computed,
            pages=len(request.pages),
            shared_pages=sum(pool.num_holders(page) > 1 for page in request.pages),
            cached_pages=0 if request.prefix is None else request.prefix.depth,
        )
        for request in scheduler.running
    )
    return PageLedger(
        page_size=page_size,
        page_bytes=page_bytes,
        total=pool.total,
        free=pool.num_free,
        cached=pool.num_cached,
        active=pool.num_active,
        shared=pool.num_shared,
        slots=pool.num_active * page_size,
        unused_slots=scheduler.unused_slots,
        host_total=scheduler.cache.host.total,
        host_held=scheduler.cache.host.num_held,
        requests=requests,
    )
