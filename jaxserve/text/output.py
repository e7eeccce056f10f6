"""Turns the engine's outputs of one request into text deltas, with stop strings; knows no engine and no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.errors import InvalidRequestError
from jaxserve.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop import StopStrings
from jaxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What one engine output added to one sequence's text.

    Attributes:
      text: settled text; may lag behind the tokens while a character or a possible stop string is unfinished.
      token_ids: the output's tokens, up to the one that completed a stop string.
      logprobs: one entry per token, if asked for.
      text_offsets: for each token the length (characters) of the output's text before it, hence where its own text
        begins; a token inside a character points at that character.
      finish_reason: set on exactly one delta of a sequence, its last.
      stop_reason: what ended it, when the caller asked for it: the stop string, or the id out of `stop_token_ids`. None
        for the model's own end-of-sequence token.
      num_output_tokens: so far, these included.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    text_offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0


class TextOutput:
    """The text of one sequence while it grows.

    A stop string ends the sequence here, not in the engine: once `finished`, the caller aborts the engine's request,
    and what the engine still sends changes nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """Args: prompt_token_ids: the text continues this prompt; empty where it stands alone (see Detokenizer)."""
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._num_settled = 0  # characters the detokenizer gave, those that a possible stop string holds back included
        self._num_tokens = 0
        self.finished = False

    def push(self, output: RequestOutput) -> TextDelta:
        """The delta of one engine output; an empty one after the end."""
        if self.finished:
            return TextDelta(num_output_tokens=self._num_tokens)
        text, offsets, stop = "", [], None
        for index, token_id in enumerate(output.token_ids):
            is_end = output.stop_token_id is not None and index == len(output.token_ids) - 1
            offsets.append(self._num_settled)
            self._num_tokens += 1
            if is_end and not self._params.include_stop_str_in_output:
                break
            shown, stop = self._show(self._detokenizer.push((token_id,)))
            text += shown
            if stop is not None:
                break
        if output.finish_reason is not None and stop is None:
            shown, stop = self._show(self._detokenizer.finish())
            text += shown + (self._stops.finish() if stop is None else "")
        taken = len(offsets)
        finish_reason, stop_reason = self._ending(output, stop)
        self.finished = finish_reason is not None
        return TextDelta(
            text=text,
            token_ids=output.token_ids[:taken],
            logprobs=None if output.logprobs is None else output.logprobs[:taken],
            text_offsets=tuple(offsets),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_output_tokens=self._num_tokens,
        )

    def _show(self, settled: str) -> tuple[str, str | None]:
        self._num_settled += len(settled)
        return self._stops.push(settled, may_stop=self._num_tokens >= self._params.min_tokens)

    def _ending(self, output: RequestOutput, stop: str | None) -> tuple[FinishReason | None, int | str | None]:
        if stop is not None:
            return "stop", stop
        asked_for = output.stop_token_id in self._params.stop_token_ids
        return output.finish_reason, output.stop_token_id if asked_for else None


def resolve_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Fills `bad_word_ids` from `bad_words`.

    A word is forbidden in two spellings, at the start of a text and after a space, since tokenizers write "word" and
    " word" with different tokens. As in vLLM, other ways to put the same letters together (inside a longer token, or by
    unusual tokens) are not covered.

    Raises:
      InvalidRequestError: a word has no tokens, or holds a lone surrogate.
    """
    if not params.bad_words:
        return params
    sequences: dict[tuple[int, ...], None] = dict.fromkeys(params.bad_word_ids)
    for word in params.bad_words:
        for spelling in (word.lstrip(" "), " " + word.lstrip(" ")):
            try:
                ids = tokenizer.encode(spelling, add_special_tokens=False) if spelling.strip(" ") else []
            except InvalidRequestError as error:
                raise InvalidRequestError(error.message, param="bad_words") from error
            if not ids:
                raise InvalidRequestError(f"bad_words holds {word!r}, which has no tokens", param="bad_words")
            sequences[tuple(ids)] = None
    return replace(params, bad_word_ids=tuple(sequences))
