"""Counts every XLA compilation of the process: after ready there must be none, and one that happens is logged."""

import logging
import threading

import jax

log = logging.getLogger(__name__)

_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"  # jax's own persistent cache, where the user has turned it on
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # not fired by a stored program that is loaded


class CompilationCounter:
    """jax has no way to remove a listener, so there is one counter a process: `COMPILATIONS`.

    Attributes:
      total: compilations since the start of the process; `after_ready` counts from `mark_ready`.
      pending: programs that a thread still adds while requests are served; compiling them is not traffic's fault.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0
        self.pending = 0
        self.total_when_ready: int | None = None
        self._of_thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def after_ready(self) -> int:
        return 0 if self.total_when_ready is None else self.total - self.total_when_ready

    def mark_ready(self) -> None:
        self.total_when_ready = self.total

    @property
    def cache_hits_in_thread(self) -> int:
        """How often jax's own cache has answered a compilation of this thread."""
        hits: int = getattr(self._of_thread, "hits", 0)
        return hits

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if event == _CACHE_HIT_EVENT:
            self._of_thread.hits = self.cache_hits_in_thread + 1

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        with self._lock:
            self.total += 1
        if self.total_when_ready is not None:
            log.warning("compiled %s after ready, in %.2f s", kwargs.get("fun_name", "a program"), duration_secs)


COMPILATIONS = CompilationCounter()
