"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shape around the same runs, streamed or whole."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequestError
from server.api.anthropic_body import CountTokensBody, MessagesBody
from server.api.chat_prompt import encode_messages
from server.api.generation import EncodedPrompt, Run
from server.api.stream import answer, typed_event
from server.errors import ANTHROPIC_ROUTES, describe, renamed
from server.service import Service

_NAMES = {"prompt": "messages", "prompt_token_ids": "messages", "stop": "stop_sequences"}


async def create_message(service: Service, request: Request) -> Response:
    arrival_time = time.perf_counter()
    body = await service.read_body(request, MessagesBody)
    try:
        params = body.sampling_params()
        run = Run(
            service,
            request_id=f"msg_{uuid.uuid4().hex}",
            prompts=[await _encode(service, body)],
            params=params,
            skip_special_tokens=True,
            arrival_time=arrival_time,
        )
    except InvalidRequestError as error:
        raise renamed(error, _NAMES) from None
    making = _Making(body, run)
    return await answer(request, run, making, is_stream=bool(body.stream), last=b"")


async def count_tokens(service: Service, request: Request) -> Response:
    body = await service.read_body(request, CountTokensBody)
    return JSONResponse({"input_tokens": len((await _encode(service, body)).token_ids)})


async def _encode(service: Service, body: CountTokensBody) -> EncodedPrompt:
    return await service.in_thread(
        lambda: encode_messages(
            service,
            body.conversation(),
            tools=body.shown_tools(),
            add_generation_prompt=not body.continues,
            continue_final_message=body.continues,
        )
    )


class _Making:
    """One message while it is made. A whole message is what its events add up to."""

    def __init__(self, body: MessagesBody, run: Run) -> None:
        self._body = body
        self._run = run
        self._text = ""
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    async def events(self) -> AsyncGenerator[bytes]:
        """The message's frame, its one text block with its deltas, how it ended and what it used."""
        try:
            block = {"index": 0, "content_block": {"type": "text", "text": ""}}
            async for delta in self._run.deltas():
                if delta.is_first:  # which tells how much of the prompt was cached
                    yield typed_event("message_start", {"message": self._message() | {"content": []}})
                    yield typed_event("content_block_start", block)
                if delta.text.text:
                    self._text += delta.text.text
                    text_delta = {"type": "text_delta", "text": delta.text.text}
                    yield typed_event("content_block_delta", {"index": 0, "delta": text_delta})
                if delta.text.finish_reason is not None:
                    self._ending = _ending(delta.text.finish_reason, delta.text.stop_reason)
            yield typed_event("content_block_stop", {"index": 0})
            yield typed_event("message_delta", {"delta": self._ending, "usage": self._usage()})
            yield typed_event("message_stop", {})
        except Exception as error:
            if not self._body.stream:
                raise
            yield typed_event("error", describe(error).body(ANTHROPIC_ROUTES))

    async def whole(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return self._message()

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._run.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [{"type": "text", "text": self._text}],
            **self._ending,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Anthropic counts a prompt's cached tokens apart from the others."""
        usage = self._run.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def _ending(finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    # Anthropic has no word for a message that the server or somebody else ended.
    reasons = {"stop": "end_turn", "length": "max_tokens"}
    return {"stop_reason": reasons.get(finish_reason, finish_reason), "stop_sequence": None}
