"""OpenAI's responses: made from a run, streamed as typed events or whole, kept for a while, read and deleted again."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import FinishReason
from jaxserve.text.tokenizer import Tokenizer
from server.api.chat_prompt import encode_messages
from server.api.conversation import Message
from server.api.generation import ChoiceDelta, EncodedPrompt, Run
from server.api.logprobs import TokenLogprob, chat_logprobs
from server.api.responses_body import ResponseBody
from server.api.responses_store import StoredResponse
from server.api.stream import answer, typed_event
from server.errors import MAX_SHOWN, NotFoundError, describe, renamed
from server.security.guard import KEY_HOLDER
from server.service import Service

# Whatever else ends a response was not its own doing.
_STATUS: Mapping[FinishReason, str] = {"stop": "completed", "length": "incomplete"}
CHARS_PER_LOGPROB = 200  # as which one is counted; metadata are bounded and count as nothing
_NAMES = {
    "prompt": "input",
    "prompt_token_ids": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


async def create_response(service: Service, request: Request) -> Response:
    arrival_time = time.perf_counter()
    body = await service.read_body(request, ResponseBody)
    params = body.sampling_params()
    history = _history(service, body)

    def encode() -> tuple[tuple[Message, ...], EncodedPrompt]:
        messages = (*history, *body.messages())
        if not messages:
            raise InvalidRequestError("input is empty; give at least one item", param="input")
        instructions = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
        return messages, encode_messages(service, [*instructions, *messages], tools=body.shown_tools())

    try:
        messages, prompt = await service.in_thread(encode)
        run = Run(
            service,
            request_id=f"resp_{uuid.uuid4().hex}",
            prompts=[prompt],
            params=params,
            skip_special_tokens=True,
            arrival_time=arrival_time,
        )
    except InvalidRequestError as error:
        raise renamed(error, _NAMES) from None
    making = _Making(service=service, body=body, run=run, messages=messages)
    return await answer(request, run, making, is_stream=bool(body.stream), last=b"")


async def show_response(service: Service, request: Request) -> Response:
    return JSONResponse(_stored(service, request).body)


async def cancel_response(service: Service, request: Request) -> Response:
    """Ends a response that is being streamed elsewhere; its stream ends with what it had."""
    stored = _stored(service, request)
    if stored.body["status"] != "in_progress":
        raise InvalidRequestError(
            f"response {stored.body['id']} is {stored.body['status']}; only one in progress can be cancelled",
            param="response_id",
        )
    service.engine.cancel(stored.body["id"])
    stored.body = {**stored.body, "status": "cancelled"}
    return JSONResponse(stored.body)


async def delete_response(service: Service, request: Request) -> Response:
    """Forgets a response; one in progress is ended, too."""
    response_id = _stored(service, request).body["id"]
    service.engine.cancel(response_id)
    service.responses.delete(_key(response_id))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _stored(service: Service, request: Request) -> StoredResponse:
    service.engine.limits()  # as every route: 503 while nothing is served
    for name in request.query_params:
        shown = name[:MAX_SHOWN]
        raise InvalidRequestError(f"unknown query parameter {shown}", param=shown, code="unknown_parameter")
    response_id = request.path_params["response_id"]
    stored = service.responses.get(_key(response_id))
    if stored is None:
        raise NotFoundError("no such response: it was never stored, was deleted, or made room for newer ones")
    return stored


def _key(response_id: str) -> str:
    """Under which a response is stored: what one API key's holder stored, no other can read, continue or end."""
    return f"{KEY_HOLDER.get()} {response_id}"


def _history(service: Service, body: ResponseBody) -> tuple[Message, ...]:
    if body.previous_response_id is None:
        return ()
    previous = service.responses.get(_key(body.previous_response_id))
    if previous is None:
        raise InvalidRequestError(
            "previous_response_id names no response: it was never stored, was deleted, or made room for newer ones",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if previous.body["status"] not in ("completed", "incomplete"):
        raise InvalidRequestError(
            f"previous_response_id names a response that is {previous.body['status']}", param="previous_response_id"
        )
    return previous.messages


class _Making:
    """One response while it is made. Its events and its final body come from the same state."""

    def __init__(self, *, service: Service, body: ResponseBody, run: Run, messages: tuple[Message, ...]) -> None:
        self._store = service.responses if body.store is not False else None
        self._tokenizer: Tokenizer = service.tokenizer
        self._body = body
        self._run = run
        self._messages = messages
        self._created = int(time.time())
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._sequence_number = -1

    async def whole(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return self._last

    async def events(self) -> AsyncGenerator[bytes]:
        """OpenAI's typed events in their order; the last one is completed, incomplete or failed."""
        where = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        status = "cancelled"  # unless it ends some other way than by its reader's leaving
        error: dict[str, Any] | None = None
        try:
            started = self._response("in_progress")
            self._keep(started)  # only now: of a client that left before, nothing would end it
            yield self._event("response.created", {"response": started})
            yield self._event("response.in_progress", {"response": started})
            item = self._item("in_progress") | {"content": []}
            yield self._event("response.output_item.added", {"output_index": 0, "item": item})
            yield self._event("response.content_part.added", where | {"part": self._part()})
            async for delta in self._run.deltas():
                logprobs = self._take(delta)
                if delta.text.text or logprobs:
                    yield self._event(
                        "response.output_text.delta", where | {"delta": delta.text.text, "logprobs": logprobs}
                    )
                if delta.text.finish_reason is not None:
                    status = _STATUS.get(delta.text.finish_reason, "cancelled")
            yield self._event("response.output_text.done", where | {"text": self._text, "logprobs": self._logprobs})
            yield self._event("response.content_part.done", where | {"part": self._part()})
            yield self._event("response.output_item.done", {"output_index": 0, "item": self._item(status)})
        except Exception as caught:
            status = "failed"
            reply = describe(caught)
            error = {"code": "server_error", "message": reply.message}
            if not self._body.stream:
                raise
        finally:
            self._last = self._response(status, error)
            self._keep(self._last)
        kind = "failed" if error else "completed" if status == "completed" else "incomplete"
        yield self._event(f"response.{kind}", {"response": self._last})

    def _take(self, delta: ChoiceDelta) -> list[TokenLogprob]:
        self._text += delta.text.text
        logprobs = chat_logprobs(self._tokenizer, delta.text.logprobs)["content"] if delta.text.logprobs else []
        self._logprobs += logprobs
        return logprobs

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._sequence_number += 1
        return typed_event(kind, {"sequence_number": self._sequence_number, **fields})

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": [*self._logprobs]}

    def _item(self, status: str) -> dict[str, Any]:
        shown = status if status in ("in_progress", "completed") else "incomplete"
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": shown,
            "content": [self._part()],
        }

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        body = self._body
        ended = status != "in_progress"
        return {
            "id": self._run.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": body.model,
            "output": [self._item(status)] if ended else [],
            "usage": self._usage() if ended else None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "store": self._store is not None,
            "background": False,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": {"type": "text"}},
            "reasoning": None,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": True,
            "truncation": "disabled",
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._run.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _keep(self, response: dict[str, Any]) -> None:
        if self._store is None:
            return
        key = _key(self._run.request_id)
        if response["status"] != "in_progress" and self._store.get(key) is None:
            return  # deleted while it was made, or it made room for others
        answer = (Message(role="assistant", content=self._text),) if response["status"] != "in_progress" else ()
        messages = (*self._messages, *answer)
        chars = sum(len(message.content or "") + len(str(message.tool_calls or "")) for message in messages)
        chars += len(self._body.instructions or "") + len(str(response["tools"])) + 1000
        chars += CHARS_PER_LOGPROB * sum(1 + len(entry["top_logprobs"]) for entry in self._logprobs)
        self._store.put(key, StoredResponse(body=response, messages=messages, chars=chars))
