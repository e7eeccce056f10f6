"""Counts every XLA compilation of the process: after ready there must be none, and one that happens is logged."""

import logging
import threading

import jax

log = logging.getLogger(__name__)

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
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def after_ready(self) -> int:
        return 0 if self.total_when_ready is None else self.total - self.total_when_ready

    def mark_ready(self) -> None:
        self.total_when_ready = self.total

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        with self._lock:
            self.total += 1
        if self.total_when_ready is not None:
            log.warning("compiled %s after ready, in %.2f s", kwargs.get("fun_name", "a program"), duration_secs)


COMPILATIONS = CompilationCounter()
