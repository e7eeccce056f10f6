"""Times of the last half minute, kept while somebody watches; a histogram since the start would hide what is new."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

WINDOW_S = 30.0
MAX_SAMPLES = 4096


class RecentTimes:
    """Seconds, each with the moment when it was measured. Belongs to the event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        self._samples.append((self._now(), seconds))

    def values(self) -> list[float]:
        """Those of the last `WINDOW_S`, at most `MAX_SAMPLES`."""
        oldest = self._now() - WINDOW_S
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        return [seconds for _, seconds in self._samples]


class RecentLatencies:
    """What users feel: the wait for the first token, and the gaps between the others."""

    def __init__(self) -> None:
        self.first_token = RecentTimes()
        self.token_gap = RecentTimes()


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed. `ordered` is sorted and not empty."""
    return ordered[max(1, math.ceil(len(ordered) * share)) - 1]
