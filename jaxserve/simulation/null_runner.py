"""A stand-in for the device: answers each step after a given time with arbitrary tokens; for tests and simulation."""

from collections.abc import Callable

import numpy as np

from jaxserve.clock import Clock, MachineClock
from jaxserve.device.runner import HostLogprobs, StepOutput
from jaxserve.request import MAX_LOGPROBS
from jaxserve.scheduling.plan import Plan, Request


def at_once(_: Plan) -> float:
    return 0.0


class NullRunner:
    """Computes nothing. Steps take their time one after the other, as on a device.

    Args:
      choose: the token that a request gets at a position.
      block_q: tokens of a prefill block, as in the configuration.
      step_seconds: how long a plan takes.
      clock: a virtual one makes the steps take no time but its own.
    """

    def __init__(
        self,
        *,
        choose: Callable[[Request, int], int],
        block_q: int,
        step_seconds: Callable[[Plan], float] = at_once,
        clock: Clock | None = None,
    ) -> None:
        self._choose = choose
        self._block_q = block_q
        self._step_seconds = step_seconds
        self._clock = clock or MachineClock()
        self._busy_until = 0.0

    def dispatch(self, plan: Plan) -> "NullHandle":
        self._busy_until = max(self._clock.now(), self._busy_until) + self._step_seconds(plan)
        tokens = np.array(list(map(self._choose, plan.samples, plan.positions)), np.int32)
        blocks = sum(chunk.num_blocks(self._block_q) for chunk in plan.chunks)
        scores = any(request.params.logprobs is not None for request in plan.samples)
        scores_prompt = any(chunk.request.params.prompt_logprobs is not None for chunk in plan.chunks)
        output = StepOutput(
            tokens=tokens,
            is_finite=np.ones(tokens.shape, np.bool_),
            logprobs=_certain(tokens.shape) if scores else None,
            prompt_logprobs=_certain((blocks, self._block_q)) if scores_prompt else None,
        )
        return NullHandle(self._clock, self._busy_until, output)


class NullHandle:
    def __init__(self, clock: Clock, ready_at: float, output: StepOutput) -> None:
        self._clock = clock
        self._ready_at = ready_at
        self._output = output

    def read(self) -> StepOutput:
        self._clock.wait_until(self._ready_at)
        return self._output


def _certain(shape: tuple[int, ...]) -> HostLogprobs:
    wide = (*shape, MAX_LOGPROBS)
    return HostLogprobs(chosen=np.zeros(shape), top_ids=np.zeros(wide, np.int32), top=np.zeros(wide))
