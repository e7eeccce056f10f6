"""A stand-in for the device: answers each step after a set time with arbitrary tokens, to measure and test the host."""

import time
from collections.abc import Callable

import numpy as np

from jaxserve.request import MAX_LOGPROBS
from jaxserve.runner import HostLogprobs, StepOutput
from jaxserve.scheduler import Plan, Sample


class NullRunner:
    """Computes nothing. Steps take `step_time_s` each, one after the other, as on a device.

    Args:
      choose: the token that a sample gets.
      block_q: tokens of a prefill block, as in the configuration.
    """

    def __init__(self, *, choose: Callable[[Sample], int], block_q: int, step_time_s: float = 0.0) -> None:
        self._choose = choose
        self._block_q = block_q
        self._step_time_s = step_time_s
        self._busy_until = 0.0

    def dispatch(self, plan: Plan) -> "NullHandle":
        self._busy_until = max(time.monotonic(), self._busy_until) + self._step_time_s
        tokens = np.array([self._choose(sample) for sample in plan.samples], np.int32)
        blocks = sum(chunk.num_blocks(self._block_q) for chunk in plan.chunks)
        return NullHandle(
            self._busy_until,
            StepOutput(
                tokens=tokens,
                logprobs=_certain(tokens.shape),
                prompt_logprobs=_certain((blocks, self._block_q)) if blocks else None,
            ),
        )


class NullHandle:
    def __init__(self, ready_at: float, output: StepOutput) -> None:
        self._ready_at = ready_at
        self._output = output

    def read(self) -> StepOutput:
        time.sleep(max(0.0, self._ready_at - time.monotonic()))
        return self._output


def _certain(shape: tuple[int, ...]) -> HostLogprobs:
    wide = (*shape, MAX_LOGPROBS)
    return HostLogprobs(chosen=np.zeros(shape), top_ids=np.zeros(wide, np.int32), top=np.zeros(wide))
