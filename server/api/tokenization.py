"""Text to token ids and back, and what a request's prompt comes to: nothing here reaches the engine."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.request import check_token_ids
from server.api.body import ModelBody, TokenIds
from server.api.chat_prompt import encode_chat
from server.api.completions import encode_prompts
from server.api.conversation import ConversationBody
from server.api.generation import EncodedPrompt
from server.api.protocol import ChatBody, CompletionBody
from server.service import Service


class TokenizeBody(ModelBody):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ConversationBody):
    """POST /tokenize with a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None


async def tokenize(service: Service, request: Request) -> Response:
    """vLLM's `/tokenize`: of a `prompt`, or of `messages` through the chat template."""
    tokenizer = service.tokenizer
    body = await service.read_body(request, _either)
    max_model_len = service.engine.limits().max_model_len
    if isinstance(body, TokenizeBody):
        service.check_text("prompt", body.prompt)

    def answer() -> Response:
        if isinstance(body, TokenizeChatBody):
            token_ids = list(encode_chat(service, body).token_ids)
        else:
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        reply: dict[str, Any] = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            reply["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
        return JSONResponse(reply)

    return await service.in_thread(answer)


def _either(fields: Mapping[str, Any]) -> type[TokenizeBody | TokenizeChatBody]:
    return TokenizeChatBody if "messages" in fields else TokenizeBody


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids. Special tokens are part of it unless `skip_special_tokens` is true."""
    tokenizer = service.tokenizer
    body = await service.read_body(request, DetokenizeBody)
    check_token_ids("tokens", body.tokens, tokenizer.vocab_size)
    skip = bool(body.skip_special_tokens)
    return await service.in_thread(
        lambda: JSONResponse({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=skip)})
    )


async def render_completion(service: Service, request: Request) -> Response:
    """What `/v1/completions` would give the engine for the same body; nothing runs."""
    body = await service.read_body(request, CompletionBody)
    body.sampling_params()
    prompts = await encode_prompts(service, body, with_text=True)
    return await service.in_thread(
        lambda: JSONResponse({"object": "list", "data": [_rendered(prompt) for prompt in prompts]})
    )


async def render_chat(service: Service, request: Request) -> Response:
    """What `/v1/chat/completions` would give the engine for the same body; nothing runs."""
    body = await service.read_body(request, ChatBody)
    body.sampling_params()
    return await service.in_thread(lambda: JSONResponse(_rendered(encode_chat(service, body))))


def _rendered(prompt: EncodedPrompt) -> dict[str, Any]:
    return {"object": "rendered_prompt", "prompt": prompt.text, "prompt_token_ids": list(prompt.token_ids)}
