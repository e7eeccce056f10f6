"""Owns what "now" means: the machine's clock, or a simulation's, which moves only when someone waits."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes back."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Returns when `now() >= moment`; at once if that has passed."""


class MachineClock:
    """`time.monotonic`."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


class VirtualClock:
    """Begins at 0; waiting takes no time."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)
