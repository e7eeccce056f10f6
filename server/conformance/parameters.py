"""Parameters: what is out of range or unknown is refused by name, and what is accepted takes effect."""

import asyncio
from typing import Any

from server.conformance.case import Case, SkippedError, expect
from server.conformance.client import CHAT, COMPLETIONS, Server

KIND = "parameters"

# path, the fields that are wrong, the parameter that the error must name
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (COMPLETIONS, {"temperature": -0.1}, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"top_p": 1.5}, "top_p"),
    (COMPLETIONS, {"top_p": -0.1}, "top_p"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": -1}, "n"),
    (COMPLETIONS, {"n": "two"}, "n"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 10**9}, "max_tokens"),
    (COMPLETIONS, {"presence_penalty": 5}, "presence_penalty"),
    (COMPLETIONS, {"frequency_penalty": -5}, "frequency_penalty"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": 100_000}, "logprobs"),
    (COMPLETIONS, {"logit_bias": {"not a token": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"999999999": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": "much"}}, "logit_bias"),
    (COMPLETIONS, {"stop": 5}, "stop"),
    (COMPLETIONS, {"stop": ["a", 5]}, "stop"),
    (COMPLETIONS, {"stream": "perhaps"}, "stream"),
    (COMPLETIONS, {"seed": "abc"}, "seed"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**9]}, "prompt"),
    (COMPLETIONS, {"prompt": ["text", 7]}, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, "prompt"),
    (COMPLETIONS, {"no_such_parameter": 1}, "no_such_parameter"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [{"content": "no role"}]}, "role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "no_such_part"}]}]}, "content"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"max_tokens": -5}, "max_tokens"),
    (CHAT, {"no_such_parameter": 1}, "no_such_parameter"),
)

# Values that only a body written by hand holds: JSON has no such numbers, and float("1e999") is infinite.
REFUSED_TEXT: tuple[tuple[str, str], ...] = (
    ("temperature", "NaN"),
    ("temperature", "Infinity"),
    ("temperature", "1e999"),
    ("presence_penalty", "NaN"),
    ("logit_bias", '{"5": 1e999}'),
)


def _refusal(path: str, fields: dict[str, Any], parameter: str) -> Case:
    async def run(server: Server) -> None:
        await server.refused(path, server.body(path, **fields), names=parameter)

    told = ", ".join(f"{name} = {value!r}" for name, value in fields.items())
    return Case(kind=KIND, claim=f"{path} refuses {told} and names {parameter}", run=run)


def _textual_refusal(parameter: str, text: str) -> Case:
    async def run(server: Server) -> None:
        body = f'{{"model": "{server.model}", "prompt": "x", "max_tokens": 2, "{parameter}": {text}}}'
        await server.refused(COMPLETIONS, body.encode())

    return Case(kind=KIND, claim=f"a completion refuses {parameter} = {text}", run=run)


async def _greedy_is_the_same_twice(server: Server) -> None:
    first, second = await server.completion_text(), await server.completion_text()
    expect(first == second, f"{first!r}, then {second!r}")


async def _greedy_among_hot_neighbours(server: Server) -> None:
    alone = await server.completion_text(max_tokens=16)
    hot = [server.completion(temperature=1.5, seed=i, max_tokens=16, presence_penalty=1) for i in range(6)]
    together, *_ = await asyncio.gather(server.completion_text(max_tokens=16), *hot)
    expect(alone == together, f"alone {alone!r}, among others {together!r}")


async def _seeded_is_the_same_twice(server: Server) -> None:
    fields = {"temperature": 1.0, "seed": 1234, "max_tokens": 16}
    first, second = await server.completion_text(**fields), await server.completion_text(**fields)
    expect(first == second, f"{first!r}, then {second!r}")


async def _seeded_among_neighbours(server: Server) -> None:
    fields = {"temperature": 1.0, "seed": 99, "max_tokens": 16}
    alone = await server.completion_text(**fields)
    others = [server.completion(temperature=1.0, seed=i, max_tokens=16) for i in range(6)]
    together, *_ = await asyncio.gather(server.completion_text(**fields), *others)
    expect(alone == together, f"alone {alone!r}, among others {together!r}")


async def _seeds_differ(server: Server) -> None:
    texts = {await server.completion_text(temperature=1.5, seed=seed, max_tokens=16) for seed in range(6)}
    expect(len(texts) > 1, f"six seeds gave one text: {texts}")


async def _max_tokens_one(server: Server) -> None:
    answer = await server.completion(max_tokens=1)
    used, reason = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    expect(used == 1, f"{used} tokens")
    expect(reason in ("length", "stop"), f"finish_reason is {reason!r}")


async def _max_completion_tokens(server: Server) -> None:
    body = server.chat_body(max_completion_tokens=2)
    del body["max_tokens"]
    used = (await server.accepted(CHAT, body))["usage"]["completion_tokens"]
    expect(used <= 2, f"{used} tokens")


async def _n_choices(server: Server) -> None:
    choices = (await server.completion(n=3, temperature=1.0))["choices"]
    indices = sorted(choice["index"] for choice in choices)
    expect(indices == [0, 1, 2], f"indices are {indices}")
    expect(all(choice["finish_reason"] for choice in choices), "a choice has no finish_reason")


async def _prompts_times_n(server: Server) -> None:
    choices = (await server.completion(prompt=["One", "Two"], n=2))["choices"]
    indices = [choice["index"] for choice in choices]
    expect(sorted(indices) == [0, 1, 2, 3], f"indices are {indices}")


async def _logprobs_zero(server: Server) -> None:
    logprobs = (await server.completion(logprobs=0, max_tokens=3))["choices"][0]["logprobs"]
    expect(logprobs is not None, "logprobs is null")
    expect(len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) > 0, f"arrays are unequal: {logprobs}")


async def _logprobs_arrays(server: Server) -> None:
    logprobs = (await server.completion(logprobs=3, max_tokens=5))["choices"][0]["logprobs"]
    lengths = {name: len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    expect(len(set(lengths.values())) == 1, f"lengths are {lengths}")
    expect(all(value <= 0 for value in logprobs["token_logprobs"]), f"a logprob is positive: {logprobs}")


async def _top_logprobs(server: Server) -> None:
    content = (await server.chat(logprobs=True, top_logprobs=4, max_tokens=4))["choices"][0]["logprobs"]["content"]
    for entry in content:
        top = [item["logprob"] for item in entry["top_logprobs"]]
        expect(len(top) == 4, f"{len(top)} alternatives, not 4")
        expect(top == sorted(top, reverse=True), f"alternatives are not in order: {top}")
        expect(abs(entry["logprob"] - top[0]) < 1e-3, f"greedy took {entry['logprob']}, the best is {top[0]}")


async def _top_logprobs_zero(server: Server) -> None:
    content = (await server.chat(logprobs=True, top_logprobs=0, max_tokens=2))["choices"][0]["logprobs"]["content"]
    expect(bool(content), "no logprobs")
    expect(all(entry["top_logprobs"] == [] for entry in content), f"alternatives though none were asked for: {content}")


async def _no_logprobs_unasked(server: Server) -> None:
    choice = (await server.chat())["choices"][0]
    expect(choice.get("logprobs") is None, "logprobs though none were asked for")


async def _logit_bias_forces(server: Server) -> None:
    ids = await server.token_ids(" the")
    plain = await server.completion(max_tokens=4, logit_bias={str(ids[-1]): 100})
    texts = {plain["choices"][0]["text"]}
    expect(len(texts) == 1 and texts.pop().count("the") >= 2, f"a bias of 100 gave {plain['choices'][0]['text']!r}")


async def _logit_bias_bans(server: Server) -> None:
    answer = await server.completion(max_tokens=1, logprobs=1)
    token = answer["choices"][0]["logprobs"]["tokens"][0]
    ids = await server.token_ids(answer["choices"][0]["text"])
    if len(ids) != 1:
        raise SkippedError("the first token's id could not be told")
    banned = await server.completion(max_tokens=1, logprobs=1, logit_bias={str(ids[0]): -100})
    again = banned["choices"][0]["logprobs"]["tokens"][0]
    expect(again != token, f"{token!r} was sampled with a bias of -100")


async def _suffix_is_not_ignored(server: Server) -> None:
    reply = await server.http.post(COMPLETIONS, json=server.completion_body(suffix=" The end."))
    expect(reply.status_code in (200, 400, 422), f"answered {reply.status_code}")
    if reply.status_code == 200:
        plain = await server.completion_text()
        expect(reply.json()["choices"][0]["text"] != plain, "suffix was accepted and ignored")


async def _response_format_is_not_ignored(server: Server) -> None:
    body = server.chat_body(response_format={"type": "json_object"}, max_tokens=24)
    reply = await server.http.post(CHAT, json=body)
    expect(reply.status_code in (200, 400, 422), f"answered {reply.status_code}")
    if reply.status_code == 200:
        text = reply.json()["choices"][0]["message"]["content"]
        expect(text.lstrip()[:1] in ("{", ""), f"json_object was accepted and ignored: {text!r}")


async def _penalties_take_effect(server: Server) -> None:
    plain = await server.completion_text(max_tokens=32)
    fields = {"max_tokens": 32, "frequency_penalty": 2, "presence_penalty": 2}
    words, punished = plain.split(), (await server.completion_text(**fields)).split()
    if len(set(words)) == len(words):
        raise SkippedError("the plain answer repeats nothing")
    repeats, kept = len(words) - len(set(words)), len(punished) - len(set(punished))
    expect(kept <= repeats and punished != words, f"{repeats} repeats without penalties, {kept} with the highest")


CASES = (
    *(_refusal(*row) for row in REFUSED),
    *(_textual_refusal(*row) for row in REFUSED_TEXT),
    *(
        Case(kind=KIND, claim=claim, run=run)
        for claim, run in (
            ("a greedy request gives the same text twice", _greedy_is_the_same_twice),
            ("a greedy row is not harmed by hot neighbours", _greedy_among_hot_neighbours),
            ("a seeded request gives the same text twice", _seeded_is_the_same_twice),
            ("a seeded request does not depend on its company", _seeded_among_neighbours),
            ("different seeds give different texts", _seeds_differ),
            ("max_tokens = 1 gives one token", _max_tokens_one),
            ("max_completion_tokens limits a chat", _max_completion_tokens),
            ("n = 3 gives three finished choices", _n_choices),
            ("two prompts with n = 2 give four choices", _prompts_times_n),
            ("logprobs = 0 gives the chosen tokens' logprobs", _logprobs_zero),
            ("the arrays of completion logprobs are equally long", _logprobs_arrays),
            ("top_logprobs = 4 gives four, best first, and greedy takes the best", _top_logprobs),
            ("top_logprobs = 0 gives no alternatives", _top_logprobs_zero),
            ("no logprobs come unasked", _no_logprobs_unasked),
            ("a logit_bias of 100 forces a token", _logit_bias_forces),
            ("a logit_bias of -100 bans a token", _logit_bias_bans),
            ("suffix is served or refused, never ignored", _suffix_is_not_ignored),
            ("response_format json_object is served or refused, never ignored", _response_format_is_not_ignored),
            ("penalties change what repeats", _penalties_take_effect),
        )
    ),
)
