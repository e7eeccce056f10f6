"""POST /v1/chat/completions: from its body to a run and back to OpenAI's shape, streamed or whole."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import FinishReason
from jaxserve.text.tokenizer import Tokenizer
from server.api.chat_prompt import encode_chat
from server.api.generation import ChoiceDelta, Run
from server.api.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from server.api.protocol import ChatBody
from server.api.stream import TextEvent, answer, event
from server.errors import renamed
from server.service import Service


async def create_chat_completion(service: Service, request: Request) -> Response:
    arrival_time = time.perf_counter()
    body = await service.read_body(request, ChatBody)
    params = await service.resolve_bad_words(body.sampling_params())
    prompt = await service.in_thread(lambda: encode_chat(service, body))
    try:
        run = Run(
            service,
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            prompts=[prompt],
            params=params,
            skip_special_tokens=body.skip_special_tokens is not False,
            arrival_time=arrival_time,
        )
    except InvalidRequestError as error:
        raise renamed(error, _names(body)) from None
    shape = _Shape(body=body, run=run, tokenizer=service.tokenizer)
    return await answer(request, run, shape, is_stream=bool(body.stream))


def _names(body: ChatBody) -> dict[str, str]:
    """The fields that this route has in place of the engine's."""
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


class _Whole(TypedDict):
    """A choice of a whole answer."""

    index: int
    message: dict[str, str | None]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class _Shape:
    """Writes one run as `chat.completion` objects. A whole answer is the join of the deltas a stream would send."""

    def __init__(self, *, body: ChatBody, run: Run, tokenizer: Tokenizer) -> None:
        self._body = body
        self._run = run
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._text_events: dict[int, TextEvent] = {}

    async def events(self) -> AsyncGenerator[bytes]:
        """For each choice its role, its content, its finish reason; at the end the usage, if asked for."""
        async for delta in self._run.deltas():
            if delta.is_first:
                yield self._chunk(delta, {"role": "assistant", "content": ""}, self._about_prompt(delta))
            logprobs, token_ids = self._logprobs(delta), self._token_ids(delta)
            if logprobs or token_ids:
                extra = {} if token_ids is None else {"token_ids": token_ids}
                yield self._chunk(delta, {"content": delta.text.text}, choice={"logprobs": logprobs, **extra})
            elif delta.text.text:
                yield self._text_event(delta)(delta.text.text)
            if delta.is_last:
                ending = {"finish_reason": delta.text.finish_reason, "stop_reason": delta.text.stop_reason}
                yield self._chunk(delta, {}, choice=ending)
        if self._body.include_usage:
            yield event(self._envelope("chat.completion.chunk", []) | {"usage": self._run.usage()})

    def _text_event(self, delta: ChoiceDelta) -> TextEvent:
        """Of a choice's deltas that bring nothing but text."""
        if delta.index not in self._text_events:
            self._text_events[delta.index] = TextEvent(self._chunk(delta, {"content": TextEvent.PLACE}))
        return self._text_events[delta.index]

    async def whole(self) -> dict[str, Any]:
        choices: dict[int, _Whole] = {}
        about_prompt: dict[str, Any] = {}
        async for delta in self._run.deltas():
            if delta.is_first:
                choices[delta.index] = self._empty(delta.index)
                about_prompt = about_prompt or self._about_prompt(delta)
            self._extend(choices[delta.index], delta)
        ordered = [choices[index] for index in sorted(choices)]
        return self._envelope("chat.completion", ordered) | {"usage": self._run.usage()} | about_prompt

    def _chunk(
        self,
        delta: ChoiceDelta,
        message: dict[str, str],
        extra: dict[str, Any] | None = None,
        choice: dict[str, Any] | None = None,
    ) -> bytes:
        usage = {"usage": None} if self._body.include_usage else {}
        whole_choice = {"index": delta.index, "delta": message, "logprobs": None, "finish_reason": None}
        envelope = self._envelope("chat.completion.chunk", [whole_choice | (choice or {})])
        return event(envelope | usage | (extra or {}))

    def _envelope(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._run.request_id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _empty(self, index: int) -> _Whole:
        choice = _Whole(
            index=index,
            message={"role": "assistant", "content": "", "refusal": None},
            logprobs=ChatLogprobs(content=[], refusal=None) if self._body.logprobs else None,
            finish_reason=None,
            stop_reason=None,
        )
        if self._body.return_token_ids:
            choice["token_ids"] = []
        return choice

    def _extend(self, choice: _Whole, delta: ChoiceDelta) -> None:
        choice["message"]["content"] = (choice["message"]["content"] or "") + delta.text.text
        choice["finish_reason"] = delta.text.finish_reason
        choice["stop_reason"] = delta.text.stop_reason
        logprobs, token_ids = self._logprobs(delta), self._token_ids(delta)
        if logprobs is not None and choice["logprobs"] is not None:
            choice["logprobs"]["content"] += logprobs["content"]
        if token_ids is not None:
            choice["token_ids"] += token_ids

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        if not delta.text.logprobs:
            return None
        return chat_logprobs(self._tokenizer, delta.text.logprobs)

    def _token_ids(self, delta: ChoiceDelta) -> list[int] | None:
        return list(delta.text.token_ids) if self._body.return_token_ids else None

    def _about_prompt(self, delta: ChoiceDelta) -> dict[str, Any]:
        """What a choice's first delta knows of the prompt; every choice has the same one."""
        about: dict[str, Any] = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = list(delta.prompt.token_ids)
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, delta.prompt_logprobs, self._body.prompt_logprobs
            )
        return about
