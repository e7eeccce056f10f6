"""Owns what lives on the device (weights, pages, last tokens, sampler rows) and runs the steps; knows no policy."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.device.batch import BatchWriter
from jaxserve.device.buckets import choose_shape
from jaxserve.device.host_pages import HostPages
from jaxserve.device.programs import Params, Programs, ProgramSpec, StepResult
from jaxserve.scheduling.plan import Plan, Request

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLogprobs:
    """`sampling.Logprobs` on the host."""

    chosen: HostArray
    top_ids: HostArray
    top: HostArray


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What a step produced, on the host.

    Attributes:
      tokens: int32[samples]; the first len(plan.samples) count.
      is_finite: bool[samples]; a row that is not came of numbers that are none, and its token means nothing.
      logprobs: of those tokens, if a request of the plan wants them.
      prompt_logprobs: [blocks, block_q, …], if a request of the plan wants them.
      embeddings: float32[samples, hidden], if a request of the plan wants one.
    """

    tokens: HostArray
    is_finite: HostArray
    logprobs: HostLogprobs | None = None
    prompt_logprobs: HostLogprobs | None = None
    embeddings: HostArray | None = None


class StepHandle(Protocol):
    """A step that was dispatched; `read` waits for it."""

    def read(self) -> StepOutput: ...


class Runner(Protocol):
    """What the engine needs of a device."""

    def dispatch(self, plan: Plan) -> StepHandle: ...


class DeviceRunner:
    """Runs plans on the device, one dispatch and one upload a step unless pages move to host memory or back.

    Args:
      spec, programs: what was compiled.
      params: the model's parameters, in the shardings of `spec.params`.
      host_pages: places for evicted pages in host memory; the spec has a host tier if there are any.
    """

    def __init__(self, spec: ProgramSpec, programs: Programs, params: Params, *, host_pages: int = 0) -> None:
        self._spec = spec
        self._programs = programs
        self._weights = jax.tree.leaves(params)
        self._state = programs.new_state()
        self._host = HostPages(spec, programs, host_pages)
        self._writer = BatchWriter(
            max_num_seqs=spec.max_num_seqs, pages_per_seq=spec.pages_per_seq, block_q=spec.block_q
        )
        # What each slot's rows hold: the residence they were written for and, for the bias, which of its rows.
        self._bias_rows: dict[int, tuple[int, Any]] = {}
        self._count_rows: dict[int, int] = {}

    def dispatch(self, plan: Plan) -> StepHandle:
        if plan.copies is not None:
            self._state = replace(self._state, kv=self._host.copy(plan.copies, self._state.kv))
        for request, position in zip(plan.samples, plan.positions, strict=True):
            self._update_rows(request, position)
        blocks = sum(chunk.num_blocks(self._spec.block_q) for chunk in plan.chunks)
        shape = choose_shape(self._programs.available_shapes(), len(plan.decodes), blocks)
        packed = self._writer.write(plan, self._programs.layouts[shape])
        result, self._state = self._programs.steps[shape](self._weights, self._state, packed)
        return _DeviceHandle(plan, result)

    def _update_rows(self, request: Request, position: int) -> None:
        if request.constraints is not None:
            key = request.constraints.key(request.token_ids, position - request.prompt_len)
            if self._bias_rows.get(request.slot) != (request.residence, key):
                self._bias_rows[request.slot] = (request.residence, key)
                row = request.constraints.row(key)
                self._state = self._programs.set_bias(self._state, np.int32(request.slot), row)
        if request.params.uses_penalties and self._count_rows.get(request.slot) != request.residence:
            # Only as a request comes to a slot: nothing of it is in flight then, and steps count from there on.
            self._count_rows[request.slot] = request.residence
            vocab_size = self._spec.model.vocab_size
            token_ids = np.asarray(request.token_ids, np.int64)
            in_prompt = np.bincount(token_ids[: request.prompt_len], minlength=vocab_size) > 0
            counts = np.bincount(token_ids[request.prompt_len :], minlength=vocab_size).astype(np.int32)
            self._state = self._programs.set_counts(self._state, np.int32(request.slot), counts, in_prompt)


class _DeviceHandle:
    def __init__(self, plan: Plan, result: StepResult) -> None:
        params = [request.params for request in plan.samples]
        self._wants_logprobs = any(p.logprobs is not None for p in params)
        self._wants_prompt_logprobs = any(chunk.request.params.prompt_logprobs is not None for chunk in plan.chunks)
        self._wants_embeddings = any(request.pooling is not None for request in plan.samples)
        self._result = result
        result.tokens.copy_to_host_async()
        result.is_finite.copy_to_host_async()

    def read(self) -> StepOutput:
        result = self._result
        prompt = result.prompt_logprobs if self._wants_prompt_logprobs else None
        return StepOutput(
            tokens=np.asarray(result.tokens),
            is_finite=np.asarray(result.is_finite),
            logprobs=_to_host(result.logprobs) if self._wants_logprobs else None,
            prompt_logprobs=None if prompt is None else _to_host(prompt),
            embeddings=np.asarray(result.embeddings) if self._wants_embeddings else None,
        )


def _to_host(logprobs: Any) -> HostLogprobs:
    return HostLogprobs(
        chosen=np.asarray(logprobs.chosen), top_ids=np.asarray(logprobs.top_ids), top=np.asarray(logprobs.top)
    )
