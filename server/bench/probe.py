"""Asks a server, before any load, for its model, for what it takes, and for how long its tokens are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.bench.errors import BenchError
from server.bench.http import ClosedError, ConnectError, HttpClient, ProtocolError
from server.bench.load import CHAT, COMPLETIONS, Conversation, Target, run_load
from server.bench.result import Result
from server.bench.workload import Api, TokenLength, sized_conversation

# What makes counts exact and lengths as wanted. No server must know these; one that refuses them is asked without.
_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
_RUNNING_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_TOKEN_IDS: dict[str, Any] = {"return_token_ids": True}
_FULL_LENGTH: dict[str, Any] = {"ignore_eos": True}
# Words of the two prompts whose tokens tell how long a word is. The longer one fits any context.
_FEW_WORDS, _MANY_WORDS = 16, 144
PROBE_TIMEOUT_S = 300.0
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Attributes:
    extras: fields for every body.
    notes: what the server does not do, in words, where it limits what can be measured.
    """

    model: str
    extras: dict[str, Any]
    length: TokenLength
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asker:
    """Sends single short requests."""

    http: HttpClient
    model: str
    api: Api
    fields: Mapping[str, Any]

    async def ask(self, extras: Mapping[str, Any], words: int) -> Result:
        target = Target(
            http=self.http,
            model=self.model,
            extras=dict(extras),
            fields=self.fields,
            timeout_s=PROBE_TIMEOUT_S,
            stall_s=PROBE_TIMEOUT_S,
        )
        return (await run_load(target, [0.0], [_conversation(words, self.api)]))[0]

    async def count(self, words: int) -> int | None:
        """The tokens of a prompt, by the usage of a reply that is not streamed."""
        body = {**_conversation(words, self.api).turns[0], **self.fields, "model": self.model}
        path = COMPLETIONS if self.api == "completions" else CHAT
        try:
            _, reply = await self.http.fetch("POST", path, json.dumps(body).encode(), timeout_s=PROBE_TIMEOUT_S)
            return int(json.loads(reply)["usage"]["prompt_tokens"])
        except (ConnectError, ClosedError, ProtocolError, TimeoutError, ValueError, LookupError, TypeError):
            return None


async def probe(
    http: HttpClient, *, model: str | None, api: Api, full_length: bool, fields: Mapping[str, Any] = _NONE
) -> Probe:
    """Sends a few short requests. Raises BenchError if the server cannot be used.

    Args:
      model: the id to ask for; None: the first that the server lists.
      full_length: ask for replies as long as `max_tokens`, whatever the model wants.
      fields: see `Target`; a server that refuses them cannot be used.
    """
    asker = _Asker(http=http, model=model if model is not None else await _first_model(http), api=api, fields=fields)
    wanted = [_RUNNING_USAGE, _TOKEN_IDS, *([_FULL_LENGTH] if full_length else [])]
    extras: dict[str, Any] = {key: value for part in wanted for key, value in part.items()}
    reply = await asker.ask(extras, _FEW_WORDS)
    if reply.failure == "http_error" and reply.status in (400, 422):
        extras = {}
        reply = await asker.ask(extras, _FEW_WORDS)
        for part in [_USAGE, *wanted]:
            if reply.ok and (await asker.ask({**extras, **part}, _FEW_WORDS)).ok:
                extras |= part
    if not reply.ok:
        raise BenchError(f"the server does not answer a short request ({reply.failure}): {reply.detail}")
    notes = []
    if full_length and "ignore_eos" not in extras:
        notes.append("the server refuses ignore_eos: replies may be shorter than asked for")
    length = await _length(asker, extras, notes)
    return Probe(model=asker.model, extras=extras, length=length, notes=tuple(notes))


async def _first_model(http: HttpClient) -> str:
    try:
        status, body = await http.fetch("GET", "/v1/models")
    except (ConnectError, ClosedError, ProtocolError, TimeoutError) as error:
        raise BenchError(f"{str(error) or 'no answer to /v1/models in 30 s'}; is the server up (--url)?") from None
    if status in (401, 403):
        raise BenchError(f"the server answers {status}; it wants a key (--api-key)")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"/v1/models answers {status} and lists no model; name one (--model)") from None


async def _length(asker: _Asker, extras: Mapping[str, Any], notes: list[str]) -> TokenLength:
    """How words become tokens: two prompts, counted by the server."""
    replies = [await asker.ask(extras, words) for words in (_FEW_WORDS, _MANY_WORDS)]
    few, many = [reply.prompt_tokens for reply in replies]
    if few is None or many is None:
        notes.append("the server counts no tokens in streams: they are counted by what came")
        few, many = [await asker.count(words) for words in (_FEW_WORDS, _MANY_WORDS)]
    if few is None or many is None or many <= few:
        notes.append("the server does not count prompts: a word is taken for a token")
        return TokenLength()
    per_word = (many - few) / (_MANY_WORDS - _FEW_WORDS)
    return TokenLength(per_word=per_word, fixed=few - _FEW_WORDS * per_word)


def _conversation(words: int, api: Api) -> Conversation:
    return sized_conversation(words, 2, TokenLength(), api, seed=words)
