"""`jaxserve run-batch`: OpenAI's batch files, a request a line, answered by the very application that serves HTTP.

An input line is `{"custom_id", "method": "POST", "url", "body"}`, an output line `{"id", "custom_id", "response":
{"status_code", "request_id", "body"}, "error"}`. The id carries the input's line number, so the order is free: each is
written as it finishes, and a second run does the lines that have no result yet.
"""

import asyncio
import dataclasses
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal, TextIO

import httpx
from pydantic import ValidationError

from jaxserve.batch_file import BatchProgress
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.json_lines import count_lines, numbered_lines, parse_line, recover
from jaxserve.llm import QUEUED_PER_SLOT
from jaxserve.startup.loading import Progress, load_engine
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import resolve_model
from server.api.body import Strict, to_invalid_request
from server.app import create_app
from server.config import SecuritySection, ServeConfig
from server.engine.async_engine import AsyncEngine

RETRY_S = 0.5  # after an answer that says to come again: the queue is full of other lines
_ID = re.compile(r"batch_req_([0-9]{1,18})")


class BatchLine(Strict):
    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    body: dict[str, Any]


def run_batch(
    config: ServeConfig,
    source: Path,
    target: Path,
    *,
    on_loading: Progress,
    on_progress: Callable[[BatchProgress], None],
) -> BatchProgress:
    """Answers every line of `source` that `target` has no result for, appending to `target`.

    A line that cannot be read gets an `error`, one that is refused the refusal as its response; the others go on.

    Raises:
      ConfigError: a file cannot be read or written, or `target` belongs to another input.
      JaxserveError, ModelError: the model cannot be loaded, or the engine died.
    """
    total = count_lines(source)
    finished = recover(target, total, _number)
    return asyncio.run(_run(config, source, target, total, finished, on_loading, on_progress))


async def _run(
    config: ServeConfig,
    source: Path,
    target: Path,
    total: int,
    finished: set[int],
    on_loading: Progress,
    on_progress: Callable[[BatchProgress], None],
) -> BatchProgress:
    tokenizer = load_tokenizer(resolve_model(config.model.path))

    def load(report: Progress) -> Any:
        def progress(phase: str, done: int, total: int) -> None:
            on_loading(phase, done, total)
            report(phase, done, total)

        return load_engine(config, tokenizer, progress=progress)

    engine = AsyncEngine(load)
    # Nobody from outside can ask, so no keys, no rates.
    settings = config.server.model_copy(
        update={"security": SecuritySection(api_keys_variable="", admin_keys_variable="")}
    )
    app = create_app(engine, tokenizer, settings)
    progress = BatchProgress(total=total, resumed=len(finished), done=0, failed=0, prompt_tokens=0, output_tokens=0)
    window = QUEUED_PER_SLOT * config.scheduler.max_num_seqs
    async with app.router.lifespan_context(app):
        try:
            await engine.wait_until_ready()
        except EngineDeadError as error:
            raise engine.failure or error from None
        on_progress(progress)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            with target.open("a", encoding="utf-8") as out:
                async for result in _results(client, engine, source, finished, window):
                    _write(out, result)
                    progress = _counted(progress, result)
                    on_progress(progress)
                os.fsync(out.fileno())
    return progress


async def _results(
    client: httpx.AsyncClient, engine: AsyncEngine, source: Path, finished: set[int], window: int
) -> AsyncIterator[dict[str, Any]]:
    """The lines' results as they come, with `window` lines under way at once."""
    under_way: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        for number, line in numbered_lines(source):
            if number in finished:
                continue
            under_way.add(asyncio.create_task(_answer(client, engine, number, line)))
            if len(under_way) >= window:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        for ended in asyncio.as_completed(under_way):
            yield await ended
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _answer(client: httpx.AsyncClient, engine: AsyncEngine, number: int, text: str) -> dict[str, Any]:
    result: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": None, "response": None, "error": None}
    try:
        fields = parse_line(text)
        result["custom_id"] = fields.get("custom_id")
        line = _checked(fields)
    except InvalidRequestError as error:
        result["error"] = {"code": error.code or "invalid_line", "message": error.message}
        return result
    while True:
        was_idle = engine.num_open == 0
        reply = await client.post(line.url, json=line.body)
        if engine.failure is not None:
            raise engine.failure  # the other lines have the next run
        body = reply.json()
        if not _may_come_again(reply.status_code, body, is_idle=was_idle and engine.num_open == 0):
            break
        await asyncio.sleep(RETRY_S)
    result["response"] = {"status_code": reply.status_code, "request_id": body.get("id"), "body": body}
    return result


def _may_come_again(status: int, body: dict[str, Any], *, is_idle: bool) -> bool:
    """Whether a refusal was for the other lines' sake. A queue that is empty will never have more room than now."""
    if status not in (429, 503):
        return False
    code = body["error"]["code"]
    return code != "deadline" and not (is_idle and code in ("queue_full", "tenant_limit"))


def _checked(fields: dict[str, Any]) -> BatchLine:
    try:
        line = BatchLine.model_validate(fields)
    except ValidationError as error:
        raise to_invalid_request(BatchLine, error) from None
    if line.body.get("stream"):
        raise InvalidRequestError("body.stream is true; a file holds whole answers", param="body.stream")
    return line


def _number(result: Any) -> int | None:
    match = _ID.fullmatch(result["id"])
    return None if match is None else int(match[1])


def _write(out: TextIO, result: dict[str, Any]) -> None:
    out.write(json.dumps(result, ensure_ascii=False) + "\n")
    out.flush()


def _counted(progress: BatchProgress, result: dict[str, Any]) -> BatchProgress:
    response = result["response"]
    usage = {} if response is None else response["body"].get("usage") or {}
    return dataclasses.replace(
        progress,
        done=progress.done + 1,
        failed=progress.failed + (response is None or response["status_code"] != 200),
        prompt_tokens=progress.prompt_tokens + usage.get("prompt_tokens", usage.get("input_tokens", 0)),
        output_tokens=progress.output_tokens + usage.get("completion_tokens", usage.get("output_tokens", 0)),
    )
