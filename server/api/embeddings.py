"""POST /v1/embeddings: each input runs as a prompt that ends before its first token; owns nothing."""

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence
from typing import Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxserve.engine import EMBEDDING_PARAMS
from jaxserve.errors import InvalidRequestError
from jaxserve.request import FinishReason
from server.api.body import USER, ModelBody
from server.api.generation import on_account
from server.api.protocol import MAX_CHOICES, Prompts
from server.api.stream import run_until_disconnect
from server.engine.commands import Job
from server.engine.engine_client import Generation, UnavailableError
from server.errors import renamed
from server.observability.metrics import SequenceRecord
from server.security.rate_limit import charge
from server.service import Service

_NAMES = {"prompt": "input", "max_tokens": "input"}


class EmbeddingsBody(ModelBody):
    """POST /v1/embeddings."""

    no_ops = {"user": USER}  # noqa: RUF012 - a ClassVar of the base

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None


async def create_embeddings(service: Service, request: Request) -> Response:
    arrival_time = time.perf_counter()
    body = await service.read_body(request, EmbeddingsBody)
    engine = service.engine.limits()
    size = engine.model_config.hidden_size
    if body.dimensions not in (None, size):
        raise InvalidRequestError(
            f"dimensions is {body.dimensions}; the model was not trained to have its {size} cut", param="dimensions"
        )
    if len(body.input) > MAX_CHOICES:
        raise InvalidRequestError(f"input has {len(body.input)} texts; the limit is {MAX_CHOICES}", param="input")
    for text in body.input:
        if isinstance(text, str):
            service.check_text("input", text)
    prompts = await service.in_thread(lambda: _encode(service, body))
    pooling = engine.config.model.pooling
    assert pooling != "auto"
    params = on_account(EMBEDDING_PARAMS)
    jobs = [Job(prompt_token_ids=prompt, params=params, pooling=pooling) for prompt in prompts]
    try:
        generation = service.engine.submit(f"embd-{uuid.uuid4().hex}", jobs)
    except InvalidRequestError as error:
        raise renamed(error, _NAMES) from None
    with generation:
        num_tokens = sum(len(prompt) for prompt in prompts)
        charge(num_tokens)
        embeddings = await run_until_disconnect(request.receive, _collect(service, generation, prompts, arrival_time))
    reply = {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(embedding, body.encoding_format)}
            for index, embedding in enumerate(embeddings)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return await service.in_thread(lambda: JSONResponse(reply))


def _encode(service: Service, body: EmbeddingsBody) -> list[Sequence[int]]:
    return [
        service.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
        if isinstance(text, str)
        else text
        for text in body.input
    ]


async def _collect(
    service: Service, generation: Generation, prompts: Sequence[Sequence[int]], arrival_time: float
) -> list[tuple[float, ...]]:
    """The embeddings in the inputs' order. Raises UnavailableError if they were aborted, by a shutdown or by id."""
    embeddings: dict[int, tuple[float, ...]] = {}
    unfinished: FinishReason = "abort"

    def end(index: int, reason: FinishReason) -> None:
        service.metrics.end(
            SequenceRecord(
                request_id=generation.request_id,
                arrival_time=arrival_time,
                end_time=time.perf_counter(),
                finish_reason=reason,
                num_prompt_tokens=len(prompts[index]),
            )
        )

    service.metrics.accept(len(prompts))
    try:
        async for index, output in generation:
            if output.embedding is None:
                raise UnavailableError("the embeddings were aborted")
            end(index, "stop")
            embeddings[index] = output.embedding
    except asyncio.CancelledError:  # the client left
        service.metrics.disconnect(len(prompts) - len(embeddings))
        raise
    except UnavailableError:
        raise
    except Exception:
        unfinished = "error"
        raise
    finally:
        for index in range(len(prompts)):
            if index not in embeddings:
                end(index, unfinished)
    return [embeddings[index] for index in range(len(prompts))]


def _written(embedding: Sequence[float], encoding_format: str | None) -> list[float] | str:
    """A list of numbers, or their float32 as little-endian bytes in base64."""
    if encoding_format == "base64":
        return base64.b64encode(np.asarray(embedding, "<f4").tobytes()).decode()
    return list(embedding)
