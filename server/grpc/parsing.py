"""Reads the calls' messages, so that one that cannot be read is the client's fault; knows no service."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from server.grpc.errors import end_call


class ParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls whose message is no message with INVALID_ARGUMENT; grpc alone logs a traceback and answers UNKNOWN."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler

        async def parsed(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return handler.request_deserializer(raw)
            except (DecodeError, ValueError) as error:
                await end_call(context, grpc.StatusCode.INVALID_ARGUMENT, f"the message cannot be read: {error}")

        async def answer(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            return await handler.unary_unary(await parsed(raw, context), context)

        async def stream(raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            request = await parsed(raw, context)
            async with aclosing(handler.unary_stream(request, context)) as responses:
                async for response in responses:
                    yield response

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)
