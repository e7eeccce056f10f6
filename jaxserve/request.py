"""What goes into the engine and what comes out of it: sampling parameters, and each step's new tokens of a request."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxserve.errors import InvalidRequestError

# Every request ends in exactly one of these.
FinishReason = Literal["stop", "length", "abort", "deadline", "error"]

MAX_LOGPROBS = 20  # OpenAI's limit, and the width of the sampler's alternatives
MAX_STOP = 16
MAX_STOP_CHARS = 2048  # of all stop strings together: the automaton that finds them has a node for each
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 2**14  # of all together
MAX_N = 128
MAX_PRIORITY = 100
MAX_NAME_CHARS = 256  # of a salt or a tenant
MAX_DEADLINE_MS = 86_400_000  # a day
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen. Fields carry the names that OpenAI and vLLM gave them.

    The order on the device: penalties and `logit_bias`, then temperature → top-k → top-p → min-p.

    Attributes:
      n: independent completions of one prompt; completion i draws from seed + i.
      max_tokens: tokens to generate at most; None means up to the context length.
      min_tokens: no end-of-sequence and no stop token before so many tokens.
      temperature: 0 is greedy.
      top_k: 0 or -1 keeps the whole vocabulary. A tie at the boundary is kept.
      top_p: the smallest set of tokens whose probability reaches this; a tie at the boundary is kept.
      min_p: drops tokens less likely than this share of the likeliest.
      repetition_penalty: over prompt and output (CTRL, Keskar et al. 2019); 1 is off.
      presence_penalty, frequency_penalty: over the output, as OpenAI defines them; 0 is off.
      logit_bias: token id → bias, -100 to 100.
      allowed_token_ids: no other token is ever sampled.
      bad_words: texts that are never generated; the text layer turns them into `bad_word_ids`.
      bad_word_ids: token sequences whose last token is forbidden where it would complete the sequence.
      seed: any 64-bit integer; None draws one.
      stop: texts that end the output; the text layer watches for them, the engine does not.
      stop_token_ids: token ids that end the output.
      ignore_eos: the model's own end-of-sequence tokens do not end the output.
      include_stop_str_in_output: keeps the stop string at the end of the text.
      logprobs: alternatives per output token (0: only the chosen one); None reports none. They are of the model's own
        distribution, before penalties, bias and temperature.
      prompt_logprobs: the same for the prompt's tokens.
      priority: lower is served earlier, under the policy `priority`.
      tenant: on whose account it runs, for the policy `fair` and for limits per tenant.
      cache_salt: pages are shared only with requests of the same salt.
      deadline_ms: after so many milliseconds it ends with what it has; refused if that is too soon for any token.
      queue_timeout_ms: it ends if it has not begun by then.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    deadline_ms: int | None = None
    queue_timeout_ms: int | None = None

    def __post_init__(self) -> None:
        _in_range("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, INT32_MAX)
        _in_range("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; it may not exceed max_tokens, {self.max_tokens}", param="min_tokens"
            )
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, -1, INT32_MAX)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            for token_id, bias in self.logit_bias.items():
                _in_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids"
            )
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        _few("stop", self.stop, MAX_STOP, MAX_STOP_CHARS)
        _few("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        if len(self.bad_word_ids) > 2 * MAX_BAD_WORDS:  # a word has two spellings
            raise InvalidRequestError(
                f"bad_word_ids has {len(self.bad_word_ids)} sequences; the limit is {2 * MAX_BAD_WORDS}",
                param="bad_word_ids",
            )
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop holds an empty string, which would end every output at once", param="stop")
        if any(not text for text in self.bad_words) or any(not ids for ids in self.bad_word_ids):
            raise InvalidRequestError(
                "bad_words holds an empty string, which would forbid everything", param="bad_words"
            )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _in_range(name, count, 0, MAX_LOGPROBS)
        _in_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name, text in (("tenant", self.tenant), ("cache_salt", self.cache_salt)):
            if text is not None and len(text) > MAX_NAME_CHARS:
                raise InvalidRequestError(
                    f"{name} has {len(text)} characters; the limit is {MAX_NAME_CHARS}", param=name
                )
        if self.cache_salt == "":
            raise InvalidRequestError("cache_salt is empty; leave it out to share with everybody", param="cache_salt")
        for name, milliseconds in (("deadline_ms", self.deadline_ms), ("queue_timeout_ms", self.queue_timeout_ms)):
            if milliseconds is not None:
                _in_range(name, milliseconds, 1, MAX_DEADLINE_MS)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a token id of these parameters lies outside the vocabulary."""
        check_token_ids("logit_bias", self.logit_bias, vocab_size)
        for name, ids in (("allowed_token_ids", self.allowed_token_ids or ()), ("stop_token_ids", self.stop_token_ids)):
            if len(ids) > vocab_size:
                raise InvalidRequestError(f"{name} has {len(ids)} ids; the vocabulary has {vocab_size}", param=name)
            check_token_ids(name, ids, vocab_size)
        for ids in self.bad_word_ids:
            check_token_ids("bad_words", ids, vocab_size)

    def choices(self) -> tuple["SamplingParams", ...]:
        """The parameters of each of the n completions: completion i draws from seed + i, wrapped to 64 bits."""
        return (self,) if self.n == 1 else tuple(replace(self, n=1, seed=seed) for seed in self.seeds())

    def seeds(self) -> tuple[int | None, ...]:
        """Of each of the n completions; None draws one."""
        if self.seed is None:
            return (None,) * self.n
        return tuple((self.seed + i + 2**63) % 2**64 - 2**63 for i in range(self.n))

    @property
    def uses_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def check_token_ids(param: str, ids: Collection[int], vocab_size: int) -> None:
    """Raises InvalidRequestError naming the first id outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{param} holds token id {wrong}; the vocabulary has ids 0 to {vocab_size - 1}", param=param
        )


def _few(name: str, texts: Collection[str], max_count: int, max_chars: int) -> None:
    if len(texts) > max_count:
        raise InvalidRequestError(f"{name} has {len(texts)} strings; the limit is {max_count}", param=name)
    chars = sum(map(len, texts))
    if chars > max_chars:
        raise InvalidRequestError(f"{name} has {chars} characters in all; the limit is {max_chars}", param=name)


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside or (isinstance(value, float) and not math.isfinite(value)):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(
            f"{name} is {value}; it must lie in {bracket}{low}, {high}]", param=name.partition("[")[0]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """One token's log-probability and the likeliest alternatives, best first; natural logarithms."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """What one step added to one request. Not frozen, as others are: one is made for each token, three times as fast.

    Attributes:
      token_ids: new tokens, in order. A token that ended the output (end-of-sequence, stop token) is included, last.
      logprobs: one entry per new token, if asked for.
      prompt_logprobs: the whole prompt's at once, with the first output token, if asked for; entry 0 is None.
      finish_reason: None while the request runs. Exactly one output of a request carries a reason, its last.
      stop_token_id: the token id that ended it, when one did.
      embedding: float32[hidden] of length 1, for a request that asked for one instead of tokens; it then has none.
      num_cached_tokens: prompt tokens whose keys and values were found in the cache.
      queue_s: seconds that it waited for its first step; with the first output token.
      error: what went wrong, where the finish reason is "error".
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    embedding: tuple[float, ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    queue_s: float | None = None
