"""Owns the requests: checks and queues them, runs steps, turns samples into outputs; knows neither text nor HTTP."""

import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.clock import Clock, MachineClock
from jaxserve.compilations import COMPILATIONS
from jaxserve.config import EngineConfig
from jaxserve.constraints import TokenConstraints
from jaxserve.device.runner import HostLogprobs, Runner, StepHandle, StepOutput
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.pooling import Pooling
from jaxserve.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.request_limits import RequestLimits
from jaxserve.scheduling.admission import Admission, Deadlines
from jaxserve.scheduling.page_ledger import PageLedger, page_ledger
from jaxserve.scheduling.picture import Picture, take_picture
from jaxserve.scheduling.plan import Chunk, Plan, Request
from jaxserve.scheduling.prefix_cache import RootKey
from jaxserve.scheduling.setup import build_scheduler, cache_root
from jaxserve.scheduling.step_history import StepHistory
from jaxserve.simulation.step_times import StepTimes
from jaxserve.step_counts import StepCounts
from models.config import ModelConfig
from models.step import KVPool

# An embedding runs as a prompt that ends where the first token would be sampled, so it needs no program of its own; the
# token is sampled with the step's others and ignored.
EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)

log = logging.getLogger(__name__)

IDLE_S = 0.001  # how long a step waits where a policy lets nobody in yet: somebody new may change that


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters since the start, and the state of this moment; pages without the dummy.

    `page_slots_unused` of `pages_active` times the page size hold no token; `prefix_cache_queries_total` and
    `prefix_cache_hits_total` count prompt tokens. `host_*`: see `scheduling.host_tier`.
    """

    num_running: int
    num_waiting: int
    pages_total: int
    pages_free: int
    pages_active: int
    pages_cached: int
    pages_shared: int
    page_slots_unused: int
    host_pages_total: int
    host_pages_held: int
    waiting_tokens: int
    preemptions_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    prefix_cache_evictions_total: int
    host_pages_saved_total: int
    host_pages_unsaved_total: int
    host_pages_restored_total: int
    host_hits_total: int
    compilations_total: int
    compilations_after_ready: int
    prompt_tokens_total: int
    output_tokens_total: int
    steps_total: int
    step_tokens_total: int
    step_token_slots_total: int
    device_wait_seconds_total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Derived:
    """What follows from sampling parameters alone; with long lists of ids it is large."""

    params: SamplingParams
    end_token_ids: frozenset[int]
    constraints: TokenConstraints | None
    root: RootKey


class Engine:
    """Continuous batching over one model. One thread drives it; only `validate` and `check_room` are for any.

    Args:
      config: resolved, without any "auto".
      num_token_ids: ids that the tokenizer has; higher ones are neither accepted nor sampled.
      eos_token_ids: ids that end an output unless a request ignores them.
      runner: the device, or a stand-in with the same face.
      clock: the machine's, unless time is simulated.
      step_times: to refuse deadlines that cannot be met, and to bring pages back from host memory only where that is
        faster than computing them; None refuses none, and brings back all.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: Runner,
        *,
        num_token_ids: int,
        eos_token_ids: frozenset[int],
        clock: Clock | None = None,
        step_times: StepTimes | None = None,
    ) -> None:
        assert isinstance(config.model.max_model_len, int), "the configuration is not resolved"
        assert isinstance(config.cache.page_size, int)
        assert isinstance(config.execution.block_q, int)
        assert config.execution.prefill_buckets != "auto"
        self.config = config
        self.model_config = model_config
        self.model_name = config.model.name
        self.max_model_len = config.model.max_model_len
        self.limits = RequestLimits(
            config=config, model_config=model_config, num_token_ids=num_token_ids, eos_token_ids=eos_token_ids
        )
        self.runner = runner
        self._clock = clock or MachineClock()
        self._page_size = config.cache.page_size
        self._scheduler = build_scheduler(config, self._clock, step_times)
        self._admission = Admission(
            self._scheduler,
            config.scheduler,
            step_times=step_times,
            page_size=self._page_size,
            block_q=config.execution.block_q,
            max_prefill_blocks=max(config.execution.prefill_buckets),
        )
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}
        self._derived: _Derived | None = None  # of the parameters that were queued last
        self._in_flight: deque[tuple[Plan, StepHandle]] = deque()
        self._ended: list[RequestOutput] = []  # last words that the next step tells
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self._counts = StepCounts(config.execution)
        self._prompt_tokens = self._output_tokens = 0
        self._history: StepHistory | None = None  # only while somebody watches

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError if the request could never be served as it stands."""
        self.limits.validate(prompt_token_ids, params)

    def check_room(self, prompt_lengths: Sequence[int], tenant: str, *, coming: Sequence[tuple[int, str]] = ()) -> None:
        """Raises QueueFullError if the queue has no room for these prompts; see `Admission.check_room`."""
        self._admission.check_room(prompt_lengths, tenant, coming=coming)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        pooling: Pooling | None = None,
    ) -> None:
        """Checks and queues one sequence; see `queue`."""
        assert params.n == 1, "the caller makes n requests of one"
        self.validate(prompt_token_ids, params)
        self.queue([request_id], prompt_token_ids, params, pooling=pooling)

    def queue(
        self,
        request_ids: Sequence[str],
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        pooling: Pooling | None = None,
    ) -> None:
        """Queues the `params.n` sequences of a prompt that `validate` let pass.

        It may be called thousands of times between two steps, which wait for it: so it does not look at the prompt or
        at lists of parameters again, and sequences of the same parameters share what is made of them.

        Args:
          request_ids: of each sequence.
          pooling: the result is the prompt's embedding; `params` are then `EMBEDDING_PARAMS`, as far as they sample.

        Raises:
          InvalidRequestError, QueueFullError, DeadlineError: before anything is queued.
        """
        assert pooling is None or params.max_tokens == 1
        ended = {output.request_id for output in self._ended}
        for request_id in request_ids:
            if request_id in self._requests or request_id in ended:
                raise InvalidRequestError(f"request id {request_id!r} is already in use", param="request_id")
        self.check_room([len(prompt_token_ids)] * params.n, params.tenant)
        limit = self.limits.longest_sequence
        if params.max_tokens is not None:
            limit = len(prompt_token_ids) + params.max_tokens
        derived = self._derive(params)
        requests = [
            Request(
                request_id=request_id,
                token_ids=list(prompt_token_ids),
                prompt_len=len(prompt_token_ids),
                params=params,
                seed=secrets.randbits(64) if seed is None else seed % 2**64,
                max_length=limit,
                end_token_ids=derived.end_token_ids,
                constraints=derived.constraints,
                root=derived.root,
                pooling=pooling,
            )
            for request_id, seed in zip(request_ids, params.seeds(), strict=True)
        ]
        if params.deadline_ms is not None:
            self._admission.check_deadline(len(prompt_token_ids), self._scheduler.cached_tokens(requests[0]), params)
        for request in requests:
            self._requests[request.request_id] = request
            self._scheduler.add(request)
            self._deadlines.add(request)

    def _derive(self, params: SamplingParams) -> _Derived:
        if self._derived is None or self._derived.params is not params:
            self._derived = _Derived(
                params=params,
                end_token_ids=frozenset(params.stop_token_ids).union(
                    () if params.ignore_eos else self.limits.eos_token_ids
                ),
                constraints=self.limits.constraints(params),
                root=cache_root(self.config, params),
            )
        return self._derived

    def abort(self, request_id: str) -> None:
        """Ends a request; the next `step` says so. An id that is unknown or has ended is ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._cut(request, "abort")

    def has_work(self) -> bool:
        return bool(self._requests or self._in_flight or self._ended)

    def step(self) -> list[RequestOutput]:
        """One iteration: dispatches a step and reads the one before it, so that the device never waits for the host.

        A request whose last token is still unread may run once more; what that row samples is ignored.
        """
        for request in self._deadlines.due(self._clock.now()):
            self._cut(request, "deadline")
        outputs, self._ended = self._ended, []
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append((plan, self.runner.dispatch(plan)))
            self._counts.add(plan)
            self._note_first_steps(plan)
            if self._history is not None:
                self._history.add(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            plan, handle = self._in_flight.popleft()
            start = self._clock.now()
            output = handle.read()
            self._counts.device_wait_s += self._clock.now() - start
            outputs += self._commit(plan, output)
        elif plan is None and self._scheduler.waiting:
            now = self._clock.now()
            self._clock.wait_until(now + min(IDLE_S, self._scheduler.waiting.opens_in(now)))
        if self.config.execution.strict_shapes and COMPILATIONS.after_ready:
            raise EngineDeadError("a program was compiled after ready, and execution.strict_shapes forbids it")
        return outputs

    def stats(self) -> EngineStats:
        pool, cache = self._scheduler.pool, self._scheduler.cache
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            pages_total=pool.total,
            pages_free=pool.num_free,
            pages_active=pool.num_active,
            pages_cached=pool.num_cached,
            pages_shared=pool.num_shared,
            page_slots_unused=self._scheduler.unused_slots,
            host_pages_total=cache.host.total,
            host_pages_held=cache.host.num_held,
            waiting_tokens=self._scheduler.waiting_tokens,
            preemptions_total=self._scheduler.num_preemptions,
            prefix_cache_queries_total=self._scheduler.num_prefix_queries,
            prefix_cache_hits_total=self._scheduler.num_prefix_hits,
            prefix_cache_evictions_total=cache.num_evictions,
            host_pages_saved_total=cache.host.num_saved,
            host_pages_unsaved_total=cache.num_unsaved,
            host_pages_restored_total=cache.host.num_restored,
            host_hits_total=cache.num_host_hits,
            compilations_total=COMPILATIONS.total,
            compilations_after_ready=COMPILATIONS.after_ready,
            prompt_tokens_total=self._prompt_tokens,
            output_tokens_total=self._output_tokens,
            steps_total=self._counts.steps,
            step_tokens_total=self._counts.tokens,
            step_token_slots_total=self._counts.token_slots,
            device_wait_seconds_total=self._counts.device_wait_s,
        )

    def _note_first_steps(self, plan: Plan) -> None:
        now = self._clock.now()
        for chunk in plan.chunks:
            if chunk.request.queue_s is None:
                chunk.request.queue_s = now - chunk.request.arrival_time

    def flush_cache(self) -> int:
        """Forgets every cached page, also while requests run; returns how many there were."""
        return self._scheduler.cache.flush()

    def page_ledger(self) -> PageLedger:
        """What the pages hold, request by request."""
        page_size, dtype = self._page_size, self.config.cache.dtype
        assert dtype != "auto"
        return page_ledger(self._scheduler, page_size, KVPool.page_bytes(self.model_config, page_size, dtype))

    def picture(self) -> Picture:
        """Requests, pages, the last steps and the prefix tree. From the first call on steps are kept, to be shown."""
        if self._history is None:
            self._history = StepHistory()
        return take_picture(self._scheduler, self._history, self._page_size)

    def end_pictures(self) -> None:
        """Nobody watches any more: forgets the steps, and keeps none."""
        self._history = None

    def check_integrity(self) -> None:
        """Raises AssertionError unless requests, queues, slots and pages agree."""
        self._scheduler.check_integrity()
        queued = {request.request_id for request in (*self._scheduler.running, *self._scheduler.queued())}
        assert queued == self._requests.keys(), f"requests without a queue: {queued ^ self._requests.keys()}"
        assert self._prompt_logprobs.keys() <= self._requests.keys()

    def _commit(self, plan: Plan, output: StepOutput) -> list[RequestOutput]:
        if output.prompt_logprobs is not None:
            self._keep_prompt_logprobs(plan.chunks, output.prompt_logprobs)
        num_rows = len(plan.samples)
        outputs = [
            self._fail(plan.samples[row])
            for row in np.flatnonzero(~output.is_finite[:num_rows]).tolist()
            if plan.samples[row].finish_reason is None
        ]
        tokens = output.tokens[:num_rows].tolist()
        reasons = self._scheduler.append(plan.samples, tokens)
        for row, (request, token_id, reason) in enumerate(zip(plan.samples, tokens, reasons, strict=True)):
            if request.finish_reason is not None:
                continue  # it ended while this step was in flight
            is_first = len(request.token_ids) == request.prompt_len + 1
            if is_first:
                self._prompt_tokens += request.prompt_len
            if request.pooling is not None:
                assert output.embeddings is not None
                outputs.append(
                    RequestOutput(
                        request_id=request.request_id,
                        token_ids=(),
                        embedding=tuple(output.embeddings[row].tolist()),
                        finish_reason="stop",
                    )
                )
                self._end(request, "stop")
                continue
            self._output_tokens += 1
            count, logprobs = request.params.logprobs, None
            if count is not None:
                assert output.logprobs is not None
                logprobs = (_token_logprobs(output.logprobs, (row,), token_id, count),)
            prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None) if is_first else None
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=(token_id,),
                    logprobs=logprobs,
                    prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
                    finish_reason=reason,
                    stop_token_id=token_id if reason == "stop" else None,
                    num_cached_tokens=request.num_cached_tokens,
                    queue_s=request.queue_s if is_first else None,
                )
            )
            if reason is not None:
                self._end(request, reason)
        return outputs

    def _fail(self, request: Request) -> RequestOutput:
        """Ends a request whose numbers went wrong; what it computed is not shared with anybody who comes later."""
        log.error(
            "request %s: the model's numbers were not finite at token %d", request.request_id, len(request.token_ids)
        )
        self._end(request, "error", keep_pages=False)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(),
            finish_reason="error",
            error=f"the model's numbers were not finite at token {len(request.token_ids)}",
        )

    def _cut(self, request: Request, reason: FinishReason) -> None:
        """Ends a request between its tokens; the next step says so."""
        self._end(request, reason)
        self._ended.append(RequestOutput(request_id=request.request_id, token_ids=(), finish_reason=reason))

    def _end(self, request: Request, reason: FinishReason, *, keep_pages: bool = True) -> None:
        """Args: keep_pages: False where the request's keys and values are not to be trusted."""
        self._scheduler.finish(request, reason, keep_pages=keep_pages)
        del self._requests[request.request_id]
        self._prompt_logprobs.pop(request.request_id, None)

    def _keep_prompt_logprobs(self, chunks: tuple[Chunk, ...], logprobs: HostLogprobs) -> None:
        """Entry p of a request's list belongs to prompt token p, which the token before it predicted."""
        assert isinstance(self.config.execution.block_q, int)
        block_q = self.config.execution.block_q
        block = 0
        for chunk in chunks:
            first_block, block = block, block + chunk.num_blocks(block_q)
            request = chunk.request
            count = request.params.prompt_logprobs
            is_done = request.finish_reason is not None or len(request.token_ids) > request.prompt_len
            if count is None or is_done:
                continue  # a resumed request has told them already
            entries = self._prompt_logprobs.setdefault(request.request_id, [None])
            del entries[chunk.start + 1 :]  # computed before a preemption
            for position in range(chunk.start + 1, min(chunk.start + chunk.count + 1, request.prompt_len)):
                offset = position - 1 - chunk.start
                index = (first_block + offset // block_q, offset % block_q)
                entries.append(_token_logprobs(logprobs, index, request.token_ids[position], count))


def _token_logprobs(logprobs: HostLogprobs, index: tuple[int, ...], token_id: int, count: int) -> TokenLogprobs:
    top_ids, top = logprobs.top_ids[index][:count].tolist(), logprobs.top[index][:count].tolist()
    return TokenLogprobs(
        token_id=token_id, logprob=float(logprobs.chosen[index]), top=tuple(zip(top_ids, top, strict=True))
    )
