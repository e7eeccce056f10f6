"""An engine without a model, for what a real one does not do on demand: die, hang, load slowly, be asked in detail.

It echoes: output token i of a request is its prompt's token i, modulo the prompt's length.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.config import CacheSection, ModelSection
from jaxserve.request import RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.request_limits import RequestLimits
from jaxserve.scheduling.page_ledger import PageLedger
from models.config import ModelConfig
from server.config import ServeConfig

VOCAB_SIZE = 49152
BAD_TOKEN = 666
FAKE_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position=64,
    eos_token_ids=(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeStats:
    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 8
    pages_free: int = 8
    pages_active: int = 0
    pages_cached: int = 0
    pages_shared: int = 0
    page_slots_unused: int = 0
    host_pages_total: int = 0
    host_pages_held: int = 0
    host_pages_saved_total: int = 0
    host_pages_unsaved_total: int = 0
    host_pages_restored_total: int = 0
    host_hits_total: int = 0
    waiting_tokens: int = 0
    preemptions_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    prefix_cache_evictions_total: int = 0
    compilations_total: int = 3
    compilations_after_ready: int = 0
    prompt_tokens_total: int = 0
    output_tokens_total: int = 0
    steps_total: int = 0
    page_slots_unused: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    prefix_cache_evictions_total: int = 0
    step_tokens_total: int = 0
    step_token_slots_total: int = 0
    device_wait_seconds_total: float = 0.0


@dataclass(kw_only=True)
class FakeRequest:
    prompt: tuple[int, ...]
    params: SamplingParams
    num_output: int = 0
    aborted: bool = False


@dataclass
class FakeEngine:
    """Set `die_at_step` or `hang_at_step` to fail there; clear `may_step` to hang, set it again to go on.

    A request whose prompt begins with `BAD_TOKEN` fails at its second token, as one does whose numbers are not finite.
    """

    model_name: str = "fake"
    max_model_len: int = 64
    step_s: float = 0.001
    die_at_step: int | None = None
    hang_at_step: int | None = None
    may_step: threading.Event = field(default_factory=threading.Event)
    calls: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.may_step.set()
        self.requests: dict[str, FakeRequest] = {}

    def page_ledger(self) -> PageLedger:
        return PageLedger(
            page_size=16,
            page_bytes=1 << 16,
            total=8,
            free=8,
            cached=0,
            active=0,
            shared=0,
            slots=0,
            unused_slots=0,
            host_total=0,
            host_held=0,
            requests=(),
        )

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(
            config=ServeConfig(  # as a real engine of `jaxserve engine` has it
                model=ModelSection(path="fake", name=self.model_name, max_model_len=self.max_model_len, pooling="last"),
                cache=CacheSection(page_size=16, num_pages=10**9),
            ),
            model_config=FAKE_MODEL,
            num_token_ids=VOCAB_SIZE,
            eos_token_ids=frozenset(),
        )

    def flush_cache(self) -> int:
        self._note("flush")
        return 7

    def check_room(self, prompt_lengths: Sequence[int], tenant: str, *, coming: Sequence[tuple[int, str]] = ()) -> None:
        """There is always room."""

    def queue(
        self,
        request_ids: Sequence[str],
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        pooling: None = None,
    ) -> None:
        assert len(request_ids) == params.n
        for request_id in request_ids:
            self._note(f"add {request_id}")
            self.requests[request_id] = FakeRequest(prompt=tuple(prompt_token_ids), params=params)

    def abort(self, request_id: str) -> None:
        self._note(f"abort {request_id}")
        if request_id in self.requests:
            self.requests[request_id].aborted = True

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self._note("step")
        self.may_step.wait()
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.num_steps == self.hang_at_step:
            threading.Event().wait()
        if self.num_steps == self.die_at_step:
            raise RuntimeError("the device is on fire")
        outputs = [self._advance(request_id, request) for request_id, request in self.requests.items()]
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return outputs

    def check_integrity(self) -> None:
        self._note("check_integrity")

    def stats(self) -> FakeStats:
        return FakeStats(num_running=len(self.requests), steps_total=self.num_steps)

    def _advance(self, request_id: str, request: FakeRequest) -> RequestOutput:
        if request.aborted:
            return RequestOutput(request_id=request_id, token_ids=(), finish_reason="abort")
        if request.prompt[0] == BAD_TOKEN and request.num_output:
            return RequestOutput(
                request_id=request_id, token_ids=(), finish_reason="error", error="its numbers were not finite"
            )
        token_id = request.prompt[request.num_output % len(request.prompt)]
        request.num_output += 1
        limit = request.params.max_tokens or self.max_model_len - len(request.prompt)
        return RequestOutput(
            request_id=request_id,
            token_ids=(token_id,),
            queue_s=0.25 if request.num_output == 1 else None,
            logprobs=None if request.params.logprobs is None else (TokenLogprobs(token_id=token_id, logprob=-1.0),),
            finish_reason="length" if request.num_output == limit else None,
        )

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)


Load = Callable[[Callable[[str, int, int], None]], FakeEngine]
