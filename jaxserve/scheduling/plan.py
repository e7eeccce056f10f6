"""What the scheduler decides about: requests and their state, and the plan of one step; knows neither jax nor text."""

from dataclasses import dataclass, field

from jaxserve.constraints import TokenConstraints
from jaxserve.pooling import Pooling
from jaxserve.request import FinishReason, SamplingParams
from jaxserve.scheduling.host_tier import Copies
from jaxserve.scheduling.prefix_cache import Prefix, RootKey


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One sequence, from its arrival to its end.

    Attributes:
      token_ids: prompt and output, as far as the host has read it.
      max_length: tokens, prompt and output, at which it ends for length.
      end_token_ids: tokens that end it: end-of-sequence (unless ignored) and its stop tokens.
      root: the prefix tree that its pages belong to.
      arrival, arrival_time: its number in the order of arrival, and the scheduler's clock then.
      pages: held pages, in order of position. `num_computed` tokens have their keys and values there, or will have when
        the steps in flight end.
      stale_from: entries of `pages` from here on are not yet in the device's block table as they stand here.
      prefix: how far its pages are known to the prefix cache, while it has a slot.
      prefill_end: tokens to compute as prompt in this residence; a resumed request recomputes its output too.
      pooling: it ends with its prompt, and its result is an embedding; None: it generates.
      num_in_flight: sampled tokens that the host has not read yet.
      num_cached_tokens: prompt tokens that it found computed when it was first admitted, or before its turn came.
      queue_s: seconds from its arrival to its first step.
      residence: a number that no other stay of any request in a slot has.
    """

    request_id: str
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    max_length: int
    end_token_ids: frozenset[int]
    constraints: TokenConstraints | None
    root: RootKey = ()
    pooling: Pooling | None = None
    arrival: int = -1
    arrival_time: float = 0.0
    slot: int = -1
    residence: int = -1
    pages: list[int] = field(default_factory=list)
    stale_from: int = 0
    prefix: Prefix | None = None
    num_computed: int = 0
    prefill_end: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens, the ones in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def may_skip_cached(self) -> bool:
        """Whether tokens found in the cache need not be computed: not while their logprobs are still to be told, and
        not for a mean over all of them."""
        return self.pooling != "mean" and (self.params.prompt_logprobs is None or len(self.token_ids) > self.prompt_len)

    def pages_to_completion(self, page_size: int) -> int:
        """Pages that it holds at its longest: the last token is never fed back, so it needs no place."""
        return -(-(self.max_length - 1) // page_size)

    def unused_slots(self, page_size: int) -> int:
        """Places in its pages that hold no token."""
        return len(self.pages) * page_size - self.num_computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Prompt tokens start to start + count of one request, computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.request.prefill_end

    def num_blocks(self, block_q: int) -> int:
        return -(-self.count // block_q)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step.

    Attributes:
      samples: requests that sample a token: the decodes first, then those whose prompts end here, in order.
      positions: that the new token of each of them will have.
      copies: to and from host memory, to be dispatched before the step; None where nothing moves.
    """

    decodes: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    samples: tuple[Request, ...]
    positions: tuple[int, ...]
    copies: Copies | None = None
