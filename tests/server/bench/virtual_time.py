"""An event loop whose clock moves only when nothing is left to do, so that times over real sockets come out exact.

Both ends of a connection run on the loop. What is written is there to be read at the same instant; a sleep of an hour
takes no time, and a test that waits for 20 ms measures 20 ms on the busiest machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
# Real seconds that the kernel has to hand loopback data over before the clock moves on.
GRACE_S = 0.0005
STUCK_S = 20.0


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(STUCK_S)
            assert ready, "the loop waits for something that never comes"
            return ready
        ready = super().select(GRACE_S)
        if not ready:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtual(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
