"""POST /v1/completions: from its body to a run and back to OpenAI's shape, streamed or whole."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.request import FinishReason, TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer
from server.api.generation import ChoiceDelta, EncodedPrompt, Run, encode_prompt
from server.api.logprobs import CompletionLogprobs, PromptLogprob, completion_logprobs, extend_logprobs, prompt_logprobs
from server.api.protocol import CompletionBody
from server.api.stream import TextEvent, answer, event
from server.service import INLINE_CHARS, Service


async def create_completion(service: Service, request: Request) -> Response:
    arrival_time = time.perf_counter()
    body = await service.read_body(request, CompletionBody)
    params = await service.resolve_bad_words(body.sampling_params())
    run = Run(
        service,
        request_id=f"cmpl-{uuid.uuid4().hex}",
        prompts=await encode_prompts(service, body, with_text=bool(body.echo)),
        params=params,
        skip_special_tokens=body.skip_special_tokens is not False,
        arrival_time=arrival_time,
    )
    shape = _Shape(body=body, run=run, tokenizer=service.tokenizer)
    return await answer(request, run, shape, is_stream=bool(body.stream))


async def encode_prompts(service: Service, body: CompletionBody, *, with_text: bool) -> list[EncodedPrompt]:
    """Raises InvalidRequestError for a text that no prompt can hold, before any is encoded."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    for text in texts:
        service.check_text("prompt", text)

    def encode() -> list[EncodedPrompt]:
        return [
            encode_prompt(
                service.tokenizer,
                prompt,
                add_special_tokens=body.add_special_tokens is not False,
                skip_special_tokens=body.skip_special_tokens is not False,
                with_text=with_text,
            )
            for prompt in body.prompt
        ]

    is_short = not with_text and sum(map(len, texts)) <= INLINE_CHARS
    return encode() if is_short else await service.in_thread(encode)


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class _Shape:
    """Writes one run as `text_completion` objects. A whole answer is the join of the deltas a stream would send."""

    def __init__(self, *, body: CompletionBody, run: Run, tokenizer: Tokenizer) -> None:
        self._body = body
        self._run = run
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._text_events: dict[int, TextEvent] = {}

    async def events(self) -> AsyncGenerator[bytes]:
        extra = {"usage": None} if self._body.include_usage else {}
        has_only_text = self._body.logprobs is None and not self._body.return_token_ids
        async for delta in self._run.deltas():
            if has_only_text and not delta.is_first and not delta.is_last:
                if delta.text.text:
                    yield self._text_event(delta.index, extra)(delta.text.text)
                continue
            choice = self._choice(delta)
            if delta.is_first or choice["text"] or choice["logprobs"] or choice.get("token_ids") or delta.is_last:
                yield event(self._envelope([choice]) | extra)
        if self._body.include_usage:
            yield event(self._envelope([]) | {"usage": self._run.usage()})

    def _text_event(self, index: int, extra: dict[str, Any]) -> TextEvent:
        """Of a choice's deltas between its first and its last."""
        if index not in self._text_events:
            choice = CompletionChoice(
                index=index, text=TextEvent.PLACE, logprobs=None, finish_reason=None, stop_reason=None
            )
            self._text_events[index] = TextEvent(event(self._envelope([choice]) | extra))
        return self._text_events[index]

    async def whole(self) -> dict[str, Any]:
        choices: dict[int, CompletionChoice] = {}
        async for delta in self._run.deltas():
            choice = self._choice(delta)
            if delta.is_first:
                choices[delta.index] = choice
            else:
                _extend(choices[delta.index], choice)
        return self._envelope([choices[index] for index in sorted(choices)]) | {"usage": self._run.usage()}

    def _envelope(self, choices: Sequence[CompletionChoice]) -> dict[str, Any]:
        return {
            "id": self._run.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        """One delta as a choice; the first one brings the echo and what else belongs to the prompt."""
        body, prompt, text = self._body, delta.prompt, delta.text
        echoes = bool(body.echo) and delta.is_first
        choice = CompletionChoice(
            index=delta.index,
            text=prompt.text + text.text if echoes else text.text,
            logprobs=self._logprobs(delta, echoes),
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
        )
        if body.return_token_ids:
            choice["token_ids"] = list(text.token_ids)
            if delta.is_first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        if body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, delta.prompt_logprobs, body.prompt_logprobs)
        return choice

    def _logprobs(self, delta: ChoiceDelta, echoes: bool) -> CompletionLogprobs | None:
        width, prompt, text = self._body.logprobs, delta.prompt, delta.text
        if width is None:
            return None
        shift = len(prompt.text)  # 0 without echo: offsets then count from the completion's own start
        token_ids = [*text.token_ids]
        logprobs: list[TokenLogprobs | None] = [*(text.logprobs or ())]
        offsets = [shift + offset for offset in text.text_offsets]
        if echoes:
            token_ids = [*prompt.token_ids, *token_ids]
            logprobs = [*(delta.prompt_logprobs or ()), *logprobs]
            offsets = [*prompt.text_offsets, *offsets]
        if not token_ids:
            return None
        return completion_logprobs(self._tokenizer, token_ids, logprobs, offsets, width)


def _extend(choice: CompletionChoice, more: CompletionChoice) -> None:
    choice["text"] += more["text"]
    choice["finish_reason"] = more["finish_reason"]
    choice["stop_reason"] = more["stop_reason"]
    if choice["logprobs"] is None:
        choice["logprobs"] = more["logprobs"]
    elif more["logprobs"] is not None:
        extend_logprobs(choice["logprobs"], more["logprobs"])
    if "token_ids" in more:
        choice["token_ids"] += more["token_ids"]
