"""Carries errors over gRPC: a status code for everybody, and the whole reply for a front end that passes it on."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import grpc
from pydantic import TypeAdapter

from server.engine.engine_client import UnavailableError
from server.errors import ErrorReply, RemoteError, describe, grpc_code

_DETAIL = "jaxserve-error-bin"
_REPLY = TypeAdapter(ErrorReply)
# Both copies of the longest message, in characters of four bytes, stay below the 8 KiB of metadata that clients take.
MAX_MESSAGE_CHARS = 400


async def abort(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the call with the error's status; does not return."""
    reply = describe(error)
    if len(reply.message) > MAX_MESSAGE_CHARS:
        reply = dataclasses.replace(reply, message=reply.message[:MAX_MESSAGE_CHARS] + "…")
    detail = json.dumps(dataclasses.asdict(reply), ensure_ascii=False).encode()
    await end_call(context, grpc_code(reply), reply.message, ((_DETAIL, detail),))


async def end_call(
    context: grpc.aio.ServicerContext,
    code: grpc.StatusCode,
    message: str,
    metadata: Sequence[tuple[str, str | bytes]] = (),
) -> NoReturn:
    """Ends the call with this status; does not return."""
    try:
        await context.abort(code, message, trailing_metadata=metadata)
    except grpc.aio.InternalError:  # its client has left, or its deadline passed: nobody listens
        raise asyncio.CancelledError from None
    raise AssertionError("abort returns never")


def error_of(error: grpc.aio.AioRpcError) -> Exception:
    """What ended a call: the engine's own error as it was, or that it cannot be reached."""
    trailing = dict(error.trailing_metadata() or ())
    detail = trailing.get(_DETAIL)
    if isinstance(detail, bytes):
        with suppress(ValueError):  # not from an engine of this version
            reply = _REPLY.validate_json(detail)
            if 400 <= reply.status <= 599:
                return RemoteError(reply)
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return UnavailableError(f"the engine does not take the call (server.max_body_bytes there): {error.details()}")
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return UnavailableError("the engine does not take this front end's key (server.engine_key_variable)")
    return UnavailableError("the engine's process cannot be reached")
