"""Keeps who ran in the last steps, while somebody watches; knows neither pages nor tokens' values."""

from collections import deque
from enum import IntEnum
from typing import NamedTuple

from jaxserve.scheduling.plan import Plan, Request

MAX_STEPS = 120
MAX_LANES = 32  # slots are handed out from the lowest, so that the first lanes are the busy ones


class TurnKind(IntEnum):
    DECODE = 0
    PREFILL = 1
    PREEMPTED = 2


class Turn(NamedTuple):
    """One request's part in one step. `number` is its arrival's; `tokens` those that the step computes for it."""

    slot: int
    number: int
    kind: TurnKind
    tokens: int


class StepRecord(NamedTuple):
    step: int
    turns: tuple[Turn, ...]


class StepHistory:
    """The last `MAX_STEPS` steps. Belongs to the engine's thread; costs a tuple for each row of a step."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._present: list[tuple[int, int, Request]] = []  # slot, residence: as of the step before
        self._next_index = 0

    def add(self, plan: Plan) -> None:
        """Notes a step that is being dispatched; call it for each of them, in order."""
        turns = [
            Turn(slot, request.arrival, TurnKind.PREEMPTED, 0)
            for slot, residence, request in self._present
            if request.finish_reason is None and (request.slot < 0 or request.residence != residence)
        ]
        turns += [Turn(request.slot, request.arrival, TurnKind.DECODE, 1) for request in plan.decodes]
        turns += [
            Turn(chunk.request.slot, chunk.request.arrival, TurnKind.PREFILL, chunk.count) for chunk in plan.chunks
        ]
        self._steps.append(StepRecord(self._next_index, tuple(turn for turn in turns if turn.slot < MAX_LANES)))
        self._next_index += 1
        ran = (*plan.decodes, *(chunk.request for chunk in plan.chunks))
        seen = {id(request) for request in ran}
        stayed = [
            (slot, residence, request)
            for slot, residence, request in self._present
            if request.residence == residence and request.slot >= 0 and id(request) not in seen
        ]
        self._present = stayed + [(request.slot, request.residence, request) for request in ran]

    def steps(self) -> tuple[StepRecord, ...]:
        """Oldest first."""
        return tuple(self._steps)
