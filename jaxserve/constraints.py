"""Which tokens a request may not (or should rather) sample next: one bias per token; knows neither device nor text.

`logit_bias`, `allowed_token_ids`, `bad_words` and `min_tokens` all end in one float32[vocab] row that is added to the
logits. The row changes seldom (when min_tokens is reached, when a forbidden word is begun or left), so it stays on the
device and is uploaded only when its key changes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams

Key = tuple[bool, tuple[int, ...]]


class TokenConstraints:
    """What some parameters forbid; the requests that share them may share it. It is small until the first row is made.

    Attributes:
      needs_every_token: the next row depends on the tokens themselves, so no step may be scheduled on unread ones.
    """

    def __init__(
        self, params: SamplingParams, end_token_ids: frozenset[int], vocab_size: int, num_token_ids: int
    ) -> None:
        self._params = params
        self._end_token_ids = end_token_ids
        self._vocab_size = vocab_size
        self._num_token_ids = num_token_ids
        self._words: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one, which is seen before the last
        for ids in params.bad_word_ids:
            if len(ids) > 1:
                self._words.setdefault(ids[-2], []).append(ids)
        self.needs_every_token = bool(self._words)
        forbidden = {ids[0] for ids in params.bad_word_ids if len(ids) == 1}
        allowed = range(num_token_ids) if params.allowed_token_ids is None else params.allowed_token_ids
        if forbidden and all(token_id in forbidden for token_id in allowed):
            raise InvalidRequestError("bad_words forbids every token that could be sampled", param="bad_words")

    @staticmethod
    def of(
        params: SamplingParams, end_token_ids: frozenset[int], vocab_size: int, num_token_ids: int
    ) -> "TokenConstraints | None":
        """None where nothing is constrained, so that nothing is uploaded or added.

        Args:
          vocab_size: columns of the logits.
          num_token_ids: ids that the tokenizer has; the columns past them are padding.
        """
        constrained = params.logit_bias or params.allowed_token_ids or params.bad_word_ids or params.min_tokens
        return TokenConstraints(params, end_token_ids, vocab_size, num_token_ids) if constrained else None

    def key(self, token_ids: Sequence[int], num_output: int) -> Key:
        """What the row depends on when output token number `num_output` (from 0) is sampled.

        Args:
          token_ids: prompt and output so far; complete if `needs_every_token`, else possibly short of tokens in flight.
        """
        begun = self._words.get(token_ids[-1], ()) if token_ids else ()
        completing = tuple(
            word[-1] for word in begun if tuple(token_ids[max(0, len(token_ids) - len(word) + 1) :]) == word[:-1]
        )
        return num_output < self._params.min_tokens, completing

    def row(self, key: Key) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32[vocab], to be added to the logits."""
        too_early, completing = key
        row = self._base.copy()
        if too_early:
            row[list(self._end_token_ids)] = -np.inf
        row[list(completing)] = -np.inf
        if np.isneginf(row).all():
            # Everything is forbidden, e.g. only the end is allowed and min_tokens forbids it: the request's own
            # allowed tokens win, since the output must go on.
            return self._base
        return row

    @cached_property
    def _base(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The row of a request that is neither too early to end nor within a bad word."""
        params = self._params
        base = np.zeros(self._vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            base[:] = -np.inf
            base[list(params.allowed_token_ids)] = 0.0
        for token_id, bias in params.logit_bias.items():
            base[token_id] += bias
        base[[ids[0] for ids in params.bad_word_ids if len(ids) == 1]] = -np.inf
        base[self._num_token_ids :] = -np.inf
        return base
