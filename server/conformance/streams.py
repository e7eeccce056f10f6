"""Streams: their order, their end, and that they say the same as the answer in one piece."""

import asyncio
from typing import Any

from server.conformance.case import Case, SkippedError, expect
from server.conformance.client import CHAT, COMPLETIONS, Json, Server

KIND = "streams"
USAGE = {"include_usage": True}


def _text(path: str, chunks: list[Json], index: int = 0) -> str:
    pieces = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                pieces.append(choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or "")
    return "".join(pieces)


async def _whole_text(server: Server, path: str, **fields: Any) -> str:
    return await (server.completion_text(**fields) if path == COMPLETIONS else server.chat_text(**fields))


async def _same_text(server: Server, path: str, **fields: Any) -> None:
    whole = await _whole_text(server, path, **fields)
    streamed = _text(path, await server.stream(path, server.body(path, **fields)))
    expect(whole == streamed, f"in one piece {whole!r}, streamed {streamed!r}")


async def _completion_equals(server: Server) -> None:
    await _same_text(server, COMPLETIONS, max_tokens=32)


async def _chat_equals(server: Server) -> None:
    await _same_text(server, CHAT, max_tokens=32)


async def _stop_equals(server: Server) -> None:
    whole = await server.completion_text(max_tokens=32)
    if len(whole) < 8:
        raise SkippedError("the answer is too short to stop in")
    await _same_text(server, COMPLETIONS, max_tokens=32, stop=whole[5:8])


async def _unmet_stop_equals(server: Server) -> None:
    whole = await server.completion_text(max_tokens=16)
    stop = whole[-2:] + "\x00never"  # held back to the very end, then released
    streamed = _text(COMPLETIONS, await server.stream(COMPLETIONS, server.completion_body(max_tokens=16, stop=stop)))
    expect(whole == streamed, f"without stop {whole!r}, with one that never comes {streamed!r}")


async def _role_first(server: Server) -> None:
    chunks = await server.stream(CHAT, server.chat_body())
    first = chunks[0]["choices"][0]["delta"]
    expect(first.get("role") == "assistant", f"the first delta is {first}")
    roles = [c for chunk in chunks[1:] for c in chunk["choices"] if c["delta"].get("role")]
    expect(not roles, "a later delta has a role, too")


async def _one_finish(server: Server, path: str) -> None:
    chunks = await server.stream(path, server.body(path))
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
    expect(len(reasons) == 1, f"finish reasons are {reasons}")
    expect(reasons[0] in ("stop", "length"), f"the finish reason is {reasons[0]!r}")
    last = [chunk for chunk in chunks if chunk["choices"]][-1]
    expect(bool(last["choices"][0].get("finish_reason")), "deltas come after the finish reason")


async def _completion_finishes_once(server: Server) -> None:
    await _one_finish(server, COMPLETIONS)


async def _chat_finishes_once(server: Server) -> None:
    await _one_finish(server, CHAT)


async def _each_choice_finishes(server: Server) -> None:
    chunks = await server.stream(CHAT, server.chat_body(n=3, temperature=1.0, max_tokens=12))
    reasons: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            expect(index not in reasons, f"choice {index} goes on after it finished")
            if choice.get("finish_reason"):
                reasons.setdefault(index, []).append(choice["finish_reason"])
    expect(sorted(reasons) == [0, 1, 2], f"choices that finished: {sorted(reasons)}")


async def _one_identity(server: Server) -> None:
    for path in (COMPLETIONS, CHAT):
        chunks = await server.stream(path, server.body(path))
        for name in ("id", "created", "model", "object"):
            values = {chunk.get(name) for chunk in chunks}
            expect(len(values) == 1 and None not in values, f"{path}: {name} is {values} over one stream")


async def _objects(server: Server) -> None:
    chat = (await server.stream(CHAT, server.chat_body()))[0]["object"]
    text = (await server.stream(COMPLETIONS, server.completion_body()))[0]["object"]
    expect((chat, text) == ("chat.completion.chunk", "text_completion"), f"objects are {chat!r} and {text!r}")


async def _usage_last(server: Server) -> None:
    for path in (COMPLETIONS, CHAT):
        chunks = await server.stream(path, server.body(path, stream_options=USAGE))
        expect(chunks[-1]["choices"] == [], f"{path}: the last chunk has choices: {chunks[-1]}")
        expect(bool(chunks[-1].get("usage")), f"{path}: the last chunk has no usage")
        early = [chunk for chunk in chunks[:-1] if chunk.get("usage")]
        expect(not early, f"{path}: usage comes before the end: {early[:1]}")


async def _usage_unasked(server: Server) -> None:
    for path in (COMPLETIONS, CHAT):
        chunks = await server.stream(path, server.body(path))
        expect(all(not chunk.get("usage") for chunk in chunks), f"{path}: usage came unasked")
        expect(all(chunk["choices"] for chunk in chunks), f"{path}: a chunk without choices")


async def _usage_equals(server: Server) -> None:
    for path in (COMPLETIONS, CHAT):
        whole = (await server.accepted(path, server.body(path)))["usage"]
        streamed = (await server.stream(path, server.body(path, stream_options=USAGE)))[-1]["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            expect(whole[name] == streamed[name], f"{path}: {name} {whole[name]}, streamed {streamed[name]}")


async def _usage_of_n(server: Server) -> None:
    body = server.chat_body(n=3, max_tokens=4, stream_options=USAGE)
    usage = (await server.stream(CHAT, body))[-1]["usage"]
    expect(usage["completion_tokens"] <= 12, f"three choices of at most 4 tokens use {usage['completion_tokens']}")
    expect(usage["completion_tokens"] >= 3, f"three choices use {usage['completion_tokens']} tokens")


async def _errors_before_the_stream(server: Server) -> None:
    for path in (COMPLETIONS, CHAT):
        await server.refused(path, server.body(path, stream=True, temperature=-1), names="temperature")


async def _logprobs_equal(server: Server) -> None:
    fields = {"logprobs": 2, "max_tokens": 8}
    whole = (await server.completion(**fields))["choices"][0]["logprobs"]
    chunks = await server.stream(COMPLETIONS, server.completion_body(**fields))
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c.get("logprobs")]
    for name in ("tokens", "text_offset"):
        joined = [item for part in parts for item in part[name]]
        expect(joined == whole[name], f"{name} {whole[name]}, streamed {joined}")
    joined = [item for part in parts for item in part["token_logprobs"]]
    close = all(abs(a - b) < 1e-2 for a, b in zip(joined, whole["token_logprobs"], strict=True))
    expect(close, f"logprobs {whole['token_logprobs']}, streamed {joined}")


async def _equal_arrays(server: Server) -> None:
    for chunk in await server.stream(COMPLETIONS, server.completion_body(logprobs=2)):
        for choice in chunk["choices"]:
            if choice.get("logprobs"):
                lengths = {name: len(values) for name, values in choice["logprobs"].items() if values is not None}
                expect(len(set(lengths.values())) == 1, f"a chunk's arrays are unequal: {lengths}")


async def _chat_logprobs_equal(server: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    whole = (await server.chat(**fields))["choices"][0]["logprobs"]["content"]
    chunks = await server.stream(CHAT, server.chat_body(**fields))
    parts = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c.get("logprobs")]
    tokens = [entry["token"] for part in parts for entry in part]
    expect(tokens == [entry["token"] for entry in whole], f"tokens differ: streamed {tokens}")


async def _streams_do_not_mix(server: Server) -> None:
    prompts = ["The colour of the sky is", "My favourite number is", "She opened the door and", "In the year 1900"]
    alone = [await server.completion_text(prompt=prompt, max_tokens=12) for prompt in prompts]
    bodies = [server.completion_body(prompt=prompt, max_tokens=12) for prompt in prompts]
    streams = await asyncio.gather(*(server.stream(COMPLETIONS, body) for body in bodies))
    together = [_text(COMPLETIONS, chunks) for chunks in streams]
    expect(alone == together, f"one by one {alone}, at once {together}")


async def _prompts_stream(server: Server) -> None:
    prompts = ["One two three", "Red green blue"]
    whole = [choice["text"] for choice in (await server.completion(prompt=prompts))["choices"]]
    chunks = await server.stream(COMPLETIONS, server.completion_body(prompt=prompts))
    streamed = [_text(COMPLETIONS, chunks, index) for index in range(2)]
    expect(whole == streamed, f"in one piece {whole}, streamed {streamed}")


async def _one_token(server: Server) -> None:
    chunks = await server.stream(CHAT, server.chat_body(max_tokens=1))
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
    expect(len(reasons) == 1, f"finish reasons are {reasons}")


async def _no_wild_gaps(server: Server) -> None:
    chunks = await server.stream(CHAT, server.chat_body(max_tokens=16))
    empty = [c for chunk in chunks[1:] for c in chunk["choices"] if not c["delta"] and not c.get("finish_reason")]
    expect(not empty, "an empty delta that ends nothing")


CASES = tuple(
    Case(kind=KIND, claim=claim, run=run)
    for claim, run in (
        ("a streamed completion says what the unstreamed one says", _completion_equals),
        ("a streamed chat says what the unstreamed one says", _chat_equals),
        ("a stop string ends both at the same place", _stop_equals),
        ("text held back for a stop that never comes is not lost", _unmet_stop_equals),
        ("the role comes first and once", _role_first),
        ("a completion finishes exactly once, at its end", _completion_finishes_once),
        ("a chat finishes exactly once, at its end", _chat_finishes_once),
        ("each of three choices finishes once, none ends another", _each_choice_finishes),
        ("id, created, model and object are one over a stream", _one_identity),
        ("chunks call themselves chat.completion.chunk and text_completion", _objects),
        ("usage, if asked for, comes last with no choices", _usage_last),
        ("usage does not come unasked", _usage_unasked),
        ("usage is the same streamed and unstreamed", _usage_equals),
        ("usage of a stream with n = 3 counts all choices", _usage_of_n),
        ("a bad request for a stream is an HTTP error, not an event", _errors_before_the_stream),
        ("completion logprobs are the same streamed and unstreamed", _logprobs_equal),
        ("each chunk's logprob arrays are equally long", _equal_arrays),
        ("chat logprobs are the same streamed and unstreamed", _chat_logprobs_equal),
        ("streams at once do not mix", _streams_do_not_mix),
        ("two prompts in one stream keep their indices", _prompts_stream),
        ("a stream of one token finishes once", _one_token),
        ("no delta is empty without ending something", _no_wild_gaps),
    )
)
