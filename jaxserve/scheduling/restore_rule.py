"""Decides whether pages in host memory come back by copy or are computed again, and how many move at once; knows
neither tree nor requests."""

from dataclasses import dataclass

from jaxserve.scheduling.host_tier import COPY_PAGES, MOST_ON_THE_WAY
from jaxserve.simulation.step_times import StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreRule:
    """Without a table that has copy times, a copy is taken to be cheaper.

    Computing a token takes two operations for each weight, copying it moves a few kilobytes a layer: for Llama-3-8B
    about 16 GFLOP against 128 KiB, ten times as long even on a fast accelerator. Only a small model on a fast device
    behind a slow bus turns that around.

    Attributes:
      block_q, max_prefill_blocks: of the steps, full ones, that would compute what is not copied.
    """

    times: StepTimes | None
    page_size: int
    block_q: int
    max_prefill_blocks: int

    def pays(self, depth: int, count: int) -> bool:
        """Whether to copy `count` pages that follow `depth` others."""
        if self.times is None or self.times.page_copy is None:
            return True
        blocks = count * self.page_size / self.block_q
        keys = (depth + count) * self.page_size * self.max_prefill_blocks
        full_step_s = self._full_step_s(self.times, keys)
        return count * self.times.page_copy.restore_seconds < full_step_s * blocks / self.max_prefill_blocks

    def most_restored(self) -> int:
        """Pages that come back in one step beside others that decode, who wait for them.

        No more than are copied without waiting, and no longer than the longest compiled step would take.
        """
        copies = None if self.times is None else self.times.page_copy
        return self._most(0.0 if copies is None else copies.restore_seconds)

    def most_saved(self) -> int:
        """Pages that go to the host in one such step, by the same measure."""
        copies = None if self.times is None else self.times.page_copy
        return self._most(0.0 if copies is None else copies.save_seconds)

    def _most(self, copy_seconds: float) -> int:
        most = COPY_PAGES[-1] * MOST_ON_THE_WAY
        if self.times is None or not copy_seconds:
            return most
        keys = self.max_prefill_blocks * self.block_q * self.max_prefill_blocks
        return min(most, max(1, int(self._full_step_s(self.times, keys) / copy_seconds)))

    def _full_step_s(self, times: StepTimes, keys: int) -> float:
        return times.estimate(0, self.max_prefill_blocks, keys)
