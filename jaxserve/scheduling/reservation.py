"""What fits: how many pages must be left over when a request is admitted; does not choose whom.

A request that runs will want more pages. `guaranteed` keeps all of them back, to the completion of everyone at its
longest, and never preempts. `optimistic` bets that most outputs end early and keeps back only a share; when it loses a
bet, somebody is preempted and the share grows, and while it wins, the share shrinks again. So preempting and resuming
cannot go on: after a few rounds it has become `guaranteed` (SGLang's new-token ratio, with steps instead of estimates).
"""

from typing import Literal

AdmissionMode = Literal["optimistic", "guaranteed"]

LEAST_SHARE = 0.1
RAISE = 0.2  # at each preemption
DECAY = 0.002  # at each step without one: about 450 steps from everything to the least


class Reservation:
    """The share of the pages to completion that is kept back; `share` is 1 where it is guaranteed."""

    def __init__(self, mode: AdmissionMode) -> None:
        self._least = 1.0 if mode == "guaranteed" else LEAST_SHARE
        self.share = self._least

    def fits(self, *, pages_now: int, pages_later: int, available: int, num_running: int) -> bool:
        """Whether a request may come in.

        Args:
          pages_now: that it takes at once: new ones, and cached ones that nobody holds yet.
          pages_later: that it and all who run will still want, at their longest.
          available: free pages and cached ones that nobody holds.
        """
        if num_running == 0:
            return pages_now <= available
        # Each running request may want its next page soon: with less, the newcomer would be the first to go.
        kept_back = min(pages_later, max(num_running, self.share * pages_later))
        return pages_now + kept_back <= available

    def on_preemption(self) -> None:
        self.share = min(1.0, self.share + RAISE)

    def on_step(self) -> None:
        """A step ran without preempting anybody."""
        self.share = max(self._least, self.share - DECAY)
