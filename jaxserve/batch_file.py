"""Runs a file of prompts through the engine into a file of results, a line each; resumes where it was interrupted.

An input line is a JSON object with `prompt` (a text or token ids) or `messages`, perhaps an `id`, and any sampling
parameter by its name in `SamplingParams`. An output line carries the input's line number, so the order is free: each is
written as it finishes, and a second run does the lines that have no result yet.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxserve.errors import InvalidRequestError
from jaxserve.json_lines import count_lines, numbered_lines, parse_line, recover
from jaxserve.llm import LLM, Generation, Job
from jaxserve.request import SamplingParams, TokenLogprobs

_PARAMS = TypeAdapter(SamplingParams)
_NAMES = {field.name for field in dataclasses.fields(SamplingParams)} - {"bad_word_ids"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchProgress:
    """Where a run stands; lines done by an earlier run count as `resumed`, not as `done`."""

    total: int
    resumed: int
    done: int
    failed: int
    prompt_tokens: int
    output_tokens: int


def run_batch_file(
    llm: LLM,
    source: Path,
    target: Path,
    defaults: SamplingParams,
    on_progress: Callable[[BatchProgress], None] = lambda _: None,
) -> BatchProgress:
    """Completes every line of `source` that `target` has no result for, appending to `target`.

    A line that cannot be served gets a result with an `error`; the others go on.

    Args:
      defaults: for what a line does not say.

    Raises:
      ConfigError: a file cannot be read or written, or `target` belongs to another input.
    """
    total = count_lines(source)
    finished = recover(target, total, _number)
    failures: list[tuple[int, str | None, InvalidRequestError]] = []
    ids: dict[int, str | None] = {}
    progress = BatchProgress(total=total, resumed=len(finished), done=0, failed=0, prompt_tokens=0, output_tokens=0)
    on_progress(progress)

    def jobs() -> Iterator[tuple[int, Job]]:
        for number, line in numbered_lines(source):
            if number in finished:
                continue
            ids[number] = None
            try:
                values = parse_line(line)
                ids[number] = values.pop("id", None)
                yield number, _job(llm, values, defaults)
            except InvalidRequestError as error:
                failures.append((number, ids.pop(number), error))

    def write_failures() -> int:
        for number, request_id, error in failures:
            write({"line": number, "id": request_id, "error": {"message": error.message, "param": error.param}})
        count = len(failures)
        failures.clear()
        return count

    with target.open("a", encoding="utf-8") as out:

        def write(result: Mapping[str, Any]) -> None:
            out.write(json.dumps(result, ensure_ascii=False) + "\n")
            out.flush()

        for number, generation in llm.run(jobs()):
            failed = write_failures()
            write({"line": number, "id": ids.pop(number), **_result(generation)})
            progress = dataclasses.replace(
                progress,
                done=progress.done + 1 + failed,
                failed=progress.failed + failed,
                prompt_tokens=progress.prompt_tokens + len(generation.prompt_token_ids),
                output_tokens=progress.output_tokens + sum(len(c.token_ids) for c in generation.completions),
            )
            on_progress(progress)
        failed = write_failures()
        os.fsync(out.fileno())
    progress = dataclasses.replace(progress, done=progress.done + failed, failed=progress.failed + failed)
    on_progress(progress)
    return progress


def _number(result: Any) -> int | None:
    number = result["line"]
    return number if type(number) is int else None


def _job(llm: LLM, values: dict[str, Any], defaults: SamplingParams) -> Job:
    prompt, messages = values.pop("prompt", None), values.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("a line has either prompt or messages", param="prompt")
    unknown = sorted(values.keys() - _NAMES)
    if unknown:
        raise InvalidRequestError(f"unknown parameter {unknown[0]}", param=unknown[0])
    for name in ("stop", "bad_words"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    try:
        # As JSON, so that lists may stand for tuples and texts for the token ids that JSON objects have as keys.
        params = _PARAMS.validate_json(json.dumps({**dataclasses.asdict(defaults), **values}), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise InvalidRequestError(f"{name} is {values.get(name)!r}: {first['msg']}", param=name) from None
    if messages is not None:
        return llm.chat_job(messages, params)
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(i) is int for i in prompt)):
        raise InvalidRequestError("prompt must be a text or a list of token ids", param="prompt")
    return llm.job(prompt, params)


def _result(generation: Generation) -> dict[str, Any]:
    choices = []
    for index, completion in enumerate(generation.completions):
        choice: dict[str, Any] = {
            "index": index,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            choice["logprobs"] = [_logprobs(entry) for entry in completion.logprobs]
        choices.append(choice)
    result: dict[str, Any] = {
        "choices": choices,
        "usage": {
            "prompt_tokens": len(generation.prompt_token_ids),
            "completion_tokens": sum(len(completion.token_ids) for completion in generation.completions),
        },
    }
    if generation.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry and _logprobs(entry) for entry in generation.prompt_logprobs]
    return result


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
