"""Text to token ids and back, and what a request's prompt comes to: nothing here reaches the engine."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.request import check_token_ids
from server.api.body import ModelBody, TokenIds
from server.api.chat_prompt import encode_chat
from server.api.conversation import ConversationBody
from server.api.generation import EncodedPrompt, encode_prompt
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
    if isinstance(body, TokenizeChatBody):
        token_ids = list((await service.in_thread(partial(encode_chat, service, body))).token_ids)
    else:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        token_ids = await service.in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
    reply: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.engine.limits().max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        reply["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
    return JSONResponse(reply)


def _either(fields: Mapping[str, Any]) -> type[TokenizeBody | TokenizeChatBody]:
    return TokenizeChatBody if "messages" in fields else TokenizeBody


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids. Special tokens are part of it unless `skip_special_tokens` is true."""
    tokenizer = service.tokenizer
    body = await service.read_body(request, DetokenizeBody)
    check_token_ids("tokens", body.tokens, tokenizer.vocab_size)
    skip = bool(body.skip_special_tokens)
    text = await service.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))
    return JSONResponse({"prompt": text})


async def render_completion(service: Service, request: Request) -> Response:
    """What `/v1/completions` would give the engine for the same body; nothing runs."""
    body = await service.read_body(request, CompletionBody)
    body.sampling_params()

    def encode() -> list[EncodedPrompt]:
        return [
            encode_prompt(
                service.tokenizer,
                prompt,
                add_special_tokens=body.add_special_tokens is not False,
                skip_special_tokens=body.skip_special_tokens is not False,
                with_text=True,
            )
            for prompt in body.prompt
        ]

    prompts = await service.in_thread(encode)
    return JSONResponse({"object": "list", "data": [_rendered(prompt) for prompt in prompts]})


async def render_chat(service: Service, request: Request) -> Response:
    """What `/v1/chat/completions` would give the engine for the same body; nothing runs."""
    body = await service.read_body(request, ChatBody)
    body.sampling_params()
    return JSONResponse(_rendered(await service.in_thread(lambda: encode_chat(service, body))))


def _rendered(prompt: EncodedPrompt) -> dict[str, Any]:
    return {"object": "rendered_prompt", "prompt": prompt.text, "prompt_token_ids": list(prompt.token_ids)}
