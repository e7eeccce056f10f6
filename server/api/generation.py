"""Runs one request's choices through the engine and turns their tokens into text; knows no route's shapes."""

import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypedDict

from jaxserve.errors import DeadlineError
from jaxserve.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.text.output import TextDelta, TextOutput
from jaxserve.text.tokenizer import Tokenizer
from server.engine.commands import Job
from server.observability.metrics import SequenceRecord
from server.security.guard import KEY_HOLDER, NOBODY
from server.security.rate_limit import ALLOWANCE
from server.service import Service


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it.

    Attributes:
      text: what `echo` and the render routes give back; may be empty where nobody asked for it.
      text_offsets: for each token, where it begins in `text`.
      is_continued: the output goes on where the prompt's text ends; otherwise it stands alone, as a chat reply does.
    """

    token_ids: Sequence[int]
    text: str = ""
    text_offsets: Sequence[int] = ()
    is_continued: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceDelta:
    """What one engine step added to one choice.

    Attributes:
      index: of the choice; choices of prompt p are p * n to p * n + n - 1.
      is_first: nothing of this choice came before.
      prompt_logprobs: of the prompt's tokens, with the first delta, if asked for.
    """

    index: int
    prompt: EncodedPrompt
    is_first: bool
    text: TextDelta
    prompt_logprobs: Sequence[TokenLogprobs | None] | None

    @property
    def is_last(self) -> bool:
        return self.text.finish_reason is not None


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """OpenAI's token counts: a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(kw_only=True, slots=True)
class _Choice:
    prompt: EncodedPrompt
    output: TextOutput
    has_started: bool = False
    first_token_time: float | None = None
    last_token_time: float | None = None
    queue_s: float | None = None
    has_ended: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0


def on_account(params: SamplingParams) -> SamplingParams:
    """The request's parameters with its key's holder as tenant: a key is proof, `user` only what the client says."""
    return params if KEY_HOLDER.get() == NOBODY else replace(params, tenant=KEY_HOLDER.get())


class Run:
    """One request's choices while the engine works on them. Leaving the `with` block aborts those that still run."""

    def __init__(
        self,
        service: Service,
        *,
        request_id: str,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        skip_special_tokens: bool,
        arrival_time: float,
    ) -> None:
        """Queues every choice of every prompt, or none.

        Args:
          arrival_time: of the request, by `time.perf_counter`.

        Raises:
          InvalidRequestError, UnavailableError, EngineDeadError: see `AsyncEngine.submit`.
        """
        self.request_id = request_id
        self._metrics = service.metrics
        self._arrival_time = arrival_time
        self._prompts = prompts
        self._num_choices = params.n
        self._has_failed = False
        params = on_account(params)
        self._choices = [
            _Choice(
                prompt=prompt,
                output=TextOutput(
                    service.tokenizer,
                    prompt.token_ids if prompt.is_continued else (),
                    params,
                    skip_special_tokens=skip_special_tokens,
                ),
            )
            for prompt in prompts
            for _ in range(params.n)
        ]
        self._allowance = ALLOWANCE.get()
        jobs = [Job(prompt_token_ids=prompt.token_ids, params=params) for prompt in prompts]
        self._generation = service.engine.submit(request_id, jobs)
        self._metrics.accept(len(self._choices))
        self._charge(sum(len(prompt.token_ids) for prompt in prompts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._generation.__exit__()
        self._charge(sum(choice.num_tokens for choice in self._choices))
        # What has no finish reason by now either failed, or its client went away.
        for choice in self._choices:
            if not choice.has_ended:
                if not self._has_failed:
                    self._metrics.disconnect(1)
                self._end(choice, "error" if self._has_failed else "abort")

    async def deltas(self) -> AsyncGenerator[ChoiceDelta]:
        """Yields until each choice has its finish reason; raises EngineDeadError, RequestFailedError, DeadlineError."""
        try:
            async for index, output in self._generation:
                choice = self._choices[index]
                is_first, choice.has_started = not choice.has_started, True
                if output.token_ids:
                    self._observe(choice, output)
                choice.num_cached_tokens = max(choice.num_cached_tokens, output.num_cached_tokens)
                if output.finish_reason == "deadline" and choice.last_token_time is None:
                    raise DeadlineError("its time ran out before its first token; no slot or page was free in time")
                delta = choice.output.push(output)
                choice.num_tokens = delta.num_output_tokens
                if delta.finish_reason is not None:
                    self._generation.abort(index)  # a stop string ends the text; the engine does not know yet
                    self._end(choice, delta.finish_reason)
                yield ChoiceDelta(
                    index=index,
                    prompt=choice.prompt,
                    is_first=is_first,
                    text=delta,
                    prompt_logprobs=output.prompt_logprobs,
                )
        except Exception:
            self._has_failed = True
            raise

    def usage(self) -> Usage:
        """The counts so far; final once `deltas` has ended."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached_tokens = sum(choice.num_cached_tokens for choice in self._choices[:: self._num_choices])
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )

    def _charge(self, num_tokens: int) -> None:
        if self._allowance is not None:
            self._allowance.charge(num_tokens)

    def _observe(self, choice: _Choice, output: RequestOutput) -> None:
        now, num_tokens = time.perf_counter(), len(output.token_ids)
        if choice.last_token_time is None:
            choice.first_token_time, choice.queue_s = now, output.queue_s
            self._metrics.observe_first_token(now - self._arrival_time, output.queue_s)
            # What came with the first token came at once.
            self._metrics.observe_inter_token(0.0, num_tokens - 1)
        else:
            self._metrics.observe_inter_token((now - choice.last_token_time) / num_tokens, num_tokens)
        choice.last_token_time = now

    def _end(self, choice: _Choice, reason: FinishReason) -> None:
        choice.has_ended = True
        self._metrics.end(
            SequenceRecord(
                request_id=self.request_id,
                arrival_time=self._arrival_time,
                end_time=time.perf_counter(),
                finish_reason=reason,
                num_prompt_tokens=len(choice.prompt.token_ids),
                num_output_tokens=choice.num_tokens,
                queue_s=choice.queue_s,
                first_token_time=choice.first_token_time,
            )
        )


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    add_special_tokens: bool,
    skip_special_tokens: bool,
    with_text: bool,
) -> EncodedPrompt:
    """Token ids of a completion's prompt, with its text and each token's place in it where those are wanted."""
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if not with_text:
            return EncodedPrompt(token_ids=token_ids)
        # Special tokens that the text spells out are part of it; a begin token that `encode` added is not.
        added = int(token_ids[:1] == [tokenizer.bos_token_id] and add_special_tokens and tokenizer.add_bos)
        hidden = frozenset(token_ids[:added])
        return EncodedPrompt(
            token_ids=token_ids, text=prompt, text_offsets=_offsets(tokenizer, token_ids, hidden, len(prompt))
        )
    if not with_text:
        return EncodedPrompt(token_ids=prompt)
    text = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
    return EncodedPrompt(token_ids=prompt, text=text, text_offsets=_offsets(tokenizer, prompt, hidden, len(text)))


def _offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], hidden: frozenset[int], text_length: int
) -> tuple[int, ...]:
    """For each token the number of characters before it; a token inside a character points at that character.

    A tokenizer that rewrites the text (spaces, Unicode forms) may shift them; none points beyond the text.
    """
    utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.utf8_errors)
    offsets = []
    length = -1 if tokenizer.strips_leading_space else 0
    for token_id in token_ids:
        offsets.append(min(max(length, 0), text_length))
        if token_id not in hidden:
            length += len(utf8.decode(tokenizer.token_bytes(token_id)))
    return tuple(offsets)
