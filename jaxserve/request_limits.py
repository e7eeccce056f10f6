"""What a model and its configuration can serve at all; knows no request that runs, so a front end elsewhere can ask."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.constraints import TokenConstraints
from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams, check_token_ids
from models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """One model's. Immutable, for any thread.

    Attributes:
      config: resolved, without any "auto".
      num_token_ids: ids that the tokenizer has; higher ones are neither accepted nor sampled.
      eos_token_ids: ids that end an output unless a request ignores them.
    """

    config: EngineConfig
    model_config: ModelConfig
    num_token_ids: int
    eos_token_ids: frozenset[int]

    @property
    def model_name(self) -> str:
        return self.config.model.name

    @property
    def max_model_len(self) -> int:
        assert isinstance(self.config.model.max_model_len, int), "the configuration is not resolved"
        return self.config.model.max_model_len

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence: its keys and values, all but the last token's, must fit the pages."""
        assert isinstance(self.config.cache.page_size, int)
        assert isinstance(self.config.cache.num_pages, int)
        num_pages = self.config.cache.num_pages - 1  # without the dummy
        return min(self.max_model_len, num_pages * self.config.cache.page_size + 1)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError if the request could never be served as it stands."""
        self.check_params(params)
        self.check_prompt(prompt_token_ids, params)

    def check_params(self, params: SamplingParams) -> None:
        """What of `validate` does not depend on the prompt; takes milliseconds where long lists are given."""
        params.check_token_ids(self.num_token_ids)
        self.constraints(params)

    def check_text(self, param: str, text: str, max_token_bytes: int) -> None:
        """Raises InvalidRequestError for a text that no prompt can hold, before seconds go into tokenizing it."""
        if len(text) > self.max_model_len * max_token_bytes:
            raise InvalidRequestError(
                f"the text has {len(text)} characters, more than the longest prompt can hold (max_model_len)",
                param=param,
                code="context_length_exceeded",
            )

    def check_prompt(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """The rest of `validate`."""
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
        length, limit = len(prompt_token_ids), self.longest_sequence
        if length + 1 > limit:
            raise InvalidRequestError(
                f"the prompt has {length} tokens; the limit is {limit - 1}, and one for the output ({self._knob()})",
                param="prompt",
                code="context_length_exceeded",
            )
        if params.max_tokens is not None and length + params.max_tokens > limit:
            raise InvalidRequestError(
                f"max_tokens is {params.max_tokens} and the prompt has {length} tokens; together they may not exceed "
                f"{limit} ({self._knob()})",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if length + params.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens} and the prompt has {length} tokens; together they may not exceed "
                f"{limit} ({self._knob()})",
                param="min_tokens",
            )
        check_token_ids("prompt", prompt_token_ids, self.num_token_ids)

    def constraints(self, params: SamplingParams) -> TokenConstraints | None:
        """Raises InvalidRequestError if they leave no token to sample."""
        ends = self.eos_token_ids.union(params.stop_token_ids)
        return TokenConstraints.of(params, ends, self.model_config.vocab_size, self.num_token_ids)

    def _knob(self) -> str:
        return "max_model_len" if self.longest_sequence == self.max_model_len else "cache.num_pages"
