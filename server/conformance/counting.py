"""Counting: usage and metrics tell what happened, once."""

import asyncio

from server.conformance.case import Case, SkippedError, expect
from server.conformance.client import CHAT, COMPLETIONS, Json, Server

KIND = "counting"


def _check(usage: Json) -> None:
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    expect(usage["total_tokens"] == total, f"total_tokens is {usage['total_tokens']}, the sum {total}")
    expect(usage["prompt_tokens"] > 0, "the prompt has no tokens")


async def _sums(server: Server) -> None:
    for path in (COMPLETIONS, CHAT):
        _check((await server.accepted(path, server.body(path)))["usage"])


async def _ids_count(server: Server) -> None:
    ids = await server.token_ids("The quick brown fox jumps over the lazy dog")
    used = (await server.completion(prompt=ids))["usage"]["prompt_tokens"]
    expect(used == len(ids), f"{len(ids)} ids count as {used} tokens")


async def _n_counts_the_prompt_once(server: Server) -> None:
    one, three = (await server.completion())["usage"], (await server.completion(n=3))["usage"]
    expect(three["prompt_tokens"] == one["prompt_tokens"], f"prompt {one['prompt_tokens']}, with n = 3 {three}")
    _check(three)
    expect(
        three["completion_tokens"] == 3 * one["completion_tokens"],
        f"greedy, one choice has {one['completion_tokens']} tokens, three have {three['completion_tokens']}",
    )


async def _prompts_add_up(server: Server) -> None:
    prompts = ["Once upon a time", "The end"]
    parts = [(await server.completion(prompt=prompt))["usage"]["prompt_tokens"] for prompt in prompts]
    both = (await server.completion(prompt=prompts))["usage"]["prompt_tokens"]
    expect(both == sum(parts), f"{parts} tokens apart, {both} together")


async def _logprobs_count_tokens(server: Server) -> None:
    answer = await server.chat(logprobs=True, max_tokens=6)
    entries, used = len(answer["choices"][0]["logprobs"]["content"]), answer["usage"]["completion_tokens"]
    # A token that ends the answer is counted and may not be told.
    expect(entries in (used, used - 1), f"{used} tokens are counted, {entries} are told")


async def _cached_is_part_of_the_prompt(server: Server) -> None:
    prompt = "A long prompt that a cache may keep. " * 12
    await server.completion(prompt=prompt)
    usage = (await server.completion(prompt=prompt))["usage"]
    details = usage.get("prompt_tokens_details") or {}
    if "cached_tokens" not in details:
        raise SkippedError("no prompt_tokens_details.cached_tokens here")
    cached = details["cached_tokens"]
    expect(0 <= cached < usage["prompt_tokens"], f"{cached} of {usage['prompt_tokens']} prompt tokens were cached")


async def _tokens_reach_the_metrics(server: Server) -> None:
    await server.wait_until_idle()
    before = await server.metrics()
    for name in ("generation_tokens_total", "prompt_tokens_total"):
        if name not in before:
            raise SkippedError(f"no {name} in /metrics")
    answers = await asyncio.gather(*(server.completion(n=2, temperature=1.0) for _ in range(4)))
    await server.wait_until_idle()
    after = await server.metrics()
    grown = after["generation_tokens_total"] - before["generation_tokens_total"]
    used = sum(answer["usage"]["completion_tokens"] for answer in answers)
    expect(grown == used, f"answers used {used} tokens, the metric grew by {grown:.0f}")


async def _every_request_ends_once(server: Server) -> None:
    await server.wait_until_idle()
    before = (await server.metrics()).get("request_success_total")
    await asyncio.gather(*(server.completion() for _ in range(5)))
    await server.wait_until_idle()
    after = (await server.metrics()).get("request_success_total")
    if after is None:
        raise SkippedError("no request_success_total in /metrics")
    expect(after - (before or 0) == 5, f"five requests counted as {after - (before or 0):.0f}")


async def _no_negative_metric(server: Server) -> None:
    negative = {name: value for name, value in (await server.metrics()).items() if value < 0}
    expect(not negative, f"negative: {negative}")


async def _first_token_is_timed_once(server: Server) -> None:
    await server.wait_until_idle()
    name = "time_to_first_token_seconds_count"
    before = (await server.metrics()).get(name)
    if before is None:
        raise SkippedError(f"no {name} in /metrics")
    await server.stream(CHAT, server.chat_body(max_tokens=12))
    await server.wait_until_idle()
    grown = (await server.metrics())[name] - before
    expect(grown == 1, f"one stream counted {grown:.0f} first tokens")


CASES = tuple(
    Case(kind=KIND, claim=claim, run=run)
    for claim, run in (
        ("total_tokens is the sum", _sums),
        ("token ids count as many tokens as there are ids", _ids_count),
        ("n = 3 counts the prompt once and the answers three times", _n_counts_the_prompt_once),
        ("two prompts count as the two alone", _prompts_add_up),
        ("as many logprobs as tokens", _logprobs_count_tokens),
        ("cached tokens are fewer than the prompt's", _cached_is_part_of_the_prompt),
        ("generated tokens in the metrics are those of the answers", _tokens_reach_the_metrics),
        ("each request is counted once at its end", _every_request_ends_once),
        ("no metric is negative", _no_negative_metric),
        ("a stream's first token is timed once", _first_token_is_timed_once),
    )
)
