"""Asks every call for an API key, as the HTTP guard asks every request; knows no service."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from server.grpc.errors import end_call
from server.security.keys import KeyRing

OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # probes show no key


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls without a known key, in the metadata as `authorization: Bearer KEY`, with UNAUTHENTICATED."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        metadata = dict(handler_call_details.invocation_metadata)
        shown = metadata.get("authorization", "")
        scheme, _, token = shown.partition(" ")
        if scheme.lower() == "bearer" and self._keys.holder(token.strip().encode()) is not None:
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse_stream)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
    await end_call(context, grpc.StatusCode.UNAUTHENTICATED, "an API key is needed, as authorization: Bearer KEY")


async def _refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> Any:
    await _refuse(request, context)
    yield  # a generator, as streams are
