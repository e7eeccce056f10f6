"""Requests and outputs as protobuf messages and back; owns nothing."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast, get_args

from jaxserve.engine import EMBEDDING_PARAMS
from jaxserve.errors import InvalidRequestError
from jaxserve.pooling import Pooling
from jaxserve.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from server.engine.commands import Job
from server.grpc import engine_pb2 as pb

_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
_DEFAULTS = SamplingParams()
_LISTS = ("allowed_token_ids", "bad_words", "stop", "stop_token_ids")


def to_params(params: SamplingParams) -> Any:
    """pb.SamplingParams; what has its default is left out."""
    message = pb.SamplingParams()
    for name in _FIELDS:
        value = getattr(params, name)
        if value == getattr(_DEFAULTS, name):
            continue
        if name == "logit_bias":
            message.logit_bias.update(value)
        elif name == "bad_word_ids":
            message.bad_word_ids.extend(pb.TokenIds(ids=ids) for ids in value)
        elif name in _LISTS:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


def from_params(message: Any) -> SamplingParams:
    """Raises InvalidRequestError for values out of range."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name == "logit_bias":
            values[name] = dict(value)
        elif name == "bad_word_ids":
            values[name] = tuple(tuple(ids.ids) for ids in value)
        else:
            values[name] = tuple(value) if name in _LISTS else value
    return SamplingParams(**values)


def to_request(request_id: str, jobs: Sequence[Job]) -> Any:
    """pb.GenerateRequest. It grows with the prompts, not with what is made of them: whatever the jobs have in common is
    said once."""
    shared = _told_params(jobs[0])
    return pb.GenerateRequest(
        request_id=request_id,
        jobs=[
            pb.Job(
                token_ids=pb.TokenIds(ids=job.prompt_token_ids),
                params=None if (params := _told_params(job)) == shared else to_params(params),
                pooling=job.pooling,
            )
            for job in jobs
        ],
        params=to_params(shared),
    )


def _told_params(job: Job) -> SamplingParams:
    return job.params if job.pooling is None else SamplingParams(tenant=job.params.tenant)


def embedding_params(params: SamplingParams) -> SamplingParams:
    """The parameters of an embedding whose client gave these; raises InvalidRequestError for what none has."""
    if params != SamplingParams(tenant=params.tenant):
        raise InvalidRequestError("an embedding takes no parameter but tenant", param="params")
    return dataclasses.replace(EMBEDDING_PARAMS, tenant=params.tenant)


def pooling_of(message: Any) -> Pooling | None:
    """Raises InvalidRequestError for an unknown one."""
    if not message.HasField("pooling"):
        return None
    if message.pooling not in get_args(Pooling):
        raise InvalidRequestError(f"pooling is {message.pooling!r}; it must be mean or last", param="pooling")
    return cast(Pooling, message.pooling)


def to_response(index: int, output: RequestOutput) -> Any:
    """pb.GenerateResponse without text."""
    return pb.GenerateResponse(
        index=index,
        token_ids=output.token_ids,
        logprobs=[_to_logprobs(entry) for entry in output.logprobs or ()],
        prompt_logprobs=[
            pb.PromptLogprob(entry=None if entry is None else _to_logprobs(entry))
            for entry in output.prompt_logprobs or ()
        ],
        finish_reason=output.finish_reason or "",
        stop_token_id=output.stop_token_id,
        num_cached_tokens=output.num_cached_tokens,
        queue_s=output.queue_s,
        embedding=output.embedding or (),
    )


def from_response(message: Any, request_id: str, params: SamplingParams) -> RequestOutput:
    """Raises ValueError for what no engine says.

    Args:
      params: what the sequence asked for; an empty list tells nothing of whether it was.
    """
    if message.finish_reason and message.finish_reason not in get_args(FinishReason):
        raise ValueError(f"unknown finish reason {message.finish_reason!r}")
    logprobs = None if params.logprobs is None else tuple(map(_from_logprobs, message.logprobs))
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    if message.prompt_logprobs:
        prompt_logprobs = tuple(
            _from_logprobs(item.entry) if item.HasField("entry") else None for item in message.prompt_logprobs
        )
    return RequestOutput(
        request_id=request_id,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=cast(FinishReason, message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        num_cached_tokens=message.num_cached_tokens,
        queue_s=message.queue_s if message.HasField("queue_s") else None,
        embedding=tuple(message.embedding) or None,
    )


def _to_logprobs(entry: TokenLogprobs) -> Any:
    ids, values = zip(*entry.top, strict=True) if entry.top else ((), ())
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top_ids=ids, top=values)


def _from_logprobs(message: Any) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple(zip(message.top_ids, message.top, strict=True)),
    )
