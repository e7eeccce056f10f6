"""Owns what the steps so far came to: tokens, padding, how long the host waited for the device; knows no request."""

from jaxserve.config import ExecutionSection
from jaxserve.device.buckets import choose_shape, step_shapes
from jaxserve.scheduling.plan import Plan


class StepCounts:
    """Args: execution: resolved, without any "auto"."""

    def __init__(self, execution: ExecutionSection) -> None:
        assert isinstance(execution.block_q, int)
        assert execution.decode_buckets != "auto"
        assert execution.prefill_buckets != "auto"
        self.steps = 0
        self.tokens = 0  # that were computed
        self.token_slots = 0  # that the steps' shapes had, padding included
        self.device_wait_s = 0.0
        self._block_q = execution.block_q
        self._shapes = step_shapes(execution.decode_buckets, execution.prefill_buckets)

    def add(self, plan: Plan) -> None:
        """Counts a step that was dispatched."""
        blocks = sum(chunk.num_blocks(self._block_q) for chunk in plan.chunks)
        shape = choose_shape(self._shapes, len(plan.decodes), blocks)
        self.steps += 1
        self.tokens += len(plan.decodes) + sum(chunk.count for chunk in plan.chunks)
        self.token_slots += shape.decode_rows + shape.prefill_blocks * self._block_q
