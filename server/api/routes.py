"""The table of every route."""

from functools import cache

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from server.api.abort import AbortBody, abort
from server.api.anthropic_body import CountTokensBody, MessagesBody
from server.api.anthropic_messages import count_tokens, create_message
from server.api.chat import create_chat_completion
from server.api.completions import create_completion
from server.api.embeddings import EmbeddingsBody, create_embeddings
from server.api.endpoint import Endpoint
from server.api.info import (
    list_models,
    package_version,
    show_health,
    show_live,
    show_load,
    show_metrics,
    show_model,
    show_ready,
    show_version,
)
from server.api.openapi import docs_page, openapi_document
from server.api.protocol import ChatBody, CompletionBody
from server.api.responses import cancel_response, create_response, delete_response, show_response
from server.api.responses_body import ResponseBody
from server.api.tokenization import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    detokenize,
    render_chat,
    render_completion,
    tokenize,
)
from server.service import Service


@cache
def _document() -> JSONResponse:
    return JSONResponse(openapi_document(ENDPOINTS, package_version()))


async def show_openapi(_: Service, __: Request) -> Response:
    return _document()


@cache
def _docs() -> HTMLResponse:
    return HTMLResponse(docs_page(openapi_document(ENDPOINTS, package_version())))


async def show_docs(_: Service, __: Request) -> Response:
    return _docs()


ENDPOINTS = (
    Endpoint(method="GET", path="/v1/models", handler=list_models, summary="The served model, as a list"),
    Endpoint(method="GET", path="/v1/models/{model:path}", handler=show_model, summary="One model"),
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=create_completion,
        body=CompletionBody,
        replies=("application/json", "text/event-stream"),
        summary="Continues a prompt",
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handler=create_chat_completion,
        body=ChatBody,
        replies=("application/json", "text/event-stream"),
        summary="Answers a conversation",
    ),
    Endpoint(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        body=ResponseBody,
        replies=("application/json", "text/event-stream"),
        summary="Answers an input, or continues an earlier response",
    ),
    Endpoint(method="GET", path="/v1/responses/{response_id}", handler=show_response, summary="A stored response"),
    Endpoint(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=cancel_response,
        summary="Ends a stored response that is in progress",
    ),
    Endpoint(
        method="DELETE", path="/v1/responses/{response_id}", handler=delete_response, summary="Forgets a response"
    ),
    Endpoint(
        method="POST",
        path="/v1/messages",
        handler=create_message,
        body=MessagesBody,
        replies=("application/json", "text/event-stream"),
        summary="Answers a conversation, in Anthropic's shape",
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        body=CountTokensBody,
        summary="How many tokens the prompt of a message has",
    ),
    Endpoint(
        method="POST",
        path="/v1/embeddings",
        handler=create_embeddings,
        body=EmbeddingsBody,
        summary="A vector of length 1 for each input",
    ),
    Endpoint(
        method="POST",
        path="/v1/completions/render",
        handler=render_completion,
        body=CompletionBody,
        summary="The text and token ids that a completion would start from",
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions/render",
        handler=render_chat,
        body=ChatBody,
        summary="The text and token ids that the chat template makes of a conversation",
    ),
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        body=(TokenizeBody, TokenizeChatBody),
        summary="Token ids of a text or a conversation",
    ),
    Endpoint(method="POST", path="/detokenize", handler=detokenize, body=DetokenizeBody, summary="Text of token ids"),
    Endpoint(method="POST", path="/abort", handler=abort, body=AbortBody, summary="Ends a running request"),
    Endpoint(method="GET", path="/health", handler=show_health, summary="200 while requests are taken, else 503"),
    Endpoint(method="GET", path="/ready", handler=show_ready, summary="200 while requests are taken"),
    Endpoint(method="GET", path="/live", handler=show_live, summary="200 unless the engine is dead"),
    Endpoint(
        method="GET", path="/metrics", handler=show_metrics, replies=("text/plain",), summary="Counters for Prometheus"
    ),
    Endpoint(method="GET", path="/load", handler=show_load, summary="How many sequences are open"),
    Endpoint(method="GET", path="/version", handler=show_version, summary="The version of jaxserve"),
    Endpoint(method="GET", path="/openapi.json", handler=show_openapi, summary="This description"),
    Endpoint(
        method="GET", path="/docs", handler=show_docs, replies=("text/html",), summary="This description, to read"
    ),
)
