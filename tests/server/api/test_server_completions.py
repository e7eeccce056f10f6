"""POST /v1/completions through the real client: every parameter, and streams that join to the whole answer."""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from live_server import LiveServer

from jaxserve.text.tokenizer import Tokenizer

PROMPT = "Once upon a time, in a café 🎉 far away"
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


def joined(client: openai.OpenAI, **request: Any) -> dict[int, dict[str, Any]]:
    """A streamed completion put together again, and checked for OpenAI's order of chunks."""
    choices: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "finish_reason": None, "stop_reason": None, "logprobs": None, "token_ids": []}
    )
    ids = set()
    for chunk in client.completions.create(**request, stream=True):
        assert chunk.object == "text_completion"
        ids.add(chunk.id)
        for choice in chunk.choices:
            whole = choices[choice.index]
            assert whole["finish_reason"] is None, "a chunk after the finish reason"
            whole["text"] += choice.text
            whole["finish_reason"] = choice.finish_reason
            whole["stop_reason"] = choice.model_extra["stop_reason"]
            whole["token_ids"] += choice.model_extra.get("token_ids", [])
            for name in ("prompt_token_ids", "prompt_logprobs"):
                if name in choice.model_extra:
                    assert name not in whole
                    whole[name] = choice.model_extra[name]
            if choice.logprobs is not None:
                parts = choice.logprobs.model_dump()
                whole["logprobs"] = {
                    name: (whole["logprobs"] or {}).get(name, []) + part for name, part in parts.items()
                }
    assert len(ids) == 1
    return dict(choices)


def whole(client: openai.OpenAI, **request: Any) -> dict[int, dict[str, Any]]:
    completion = client.completions.create(**request)
    return {
        choice.index: {
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": None if choice.logprobs is None else choice.logprobs.model_dump(),
            "stop_reason": None,
            "token_ids": [],
            **choice.model_extra,
        }
        for choice in completion.choices
    }


def approximately(choices: dict[int, dict[str, Any]]) -> Any:
    """The choices with logprobs to 1e-4: other requests in the batch may change their last digits."""

    def soften(value: Any) -> Any:
        if isinstance(value, float):
            return pytest.approx(value, abs=1e-4)
        if isinstance(value, dict):
            return {key: soften(item) for key, item in value.items()}
        return [soften(item) for item in value] if isinstance(value, list) else value

    return soften(choices)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1, "n": 3},
        {"echo": True},
        {"logprobs": 0},
        {"logprobs": 3},
        {"logprobs": 20, "max_tokens": 3},
        {"echo": True, "logprobs": 2},
        {"prompt": [PROMPT, "Another prompt", "x"], "n": 2, "seed": 3, "temperature": 1.0, "logprobs": 1, "echo": True},
        {"prompt": [10, 11, 12]},
        {"prompt": [[10, 11, 12], [400]], "echo": True, "logprobs": 1},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"logit_bias": {"100": 100}, "max_tokens": 4},
        {"extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3}, "temperature": 1.2, "seed": 9},
        {"extra_body": {"prompt_logprobs": 2}},
        {"extra_body": {"prompt_logprobs": 0}, "echo": True, "logprobs": 2},
        {"extra_body": {"return_token_ids": True, "ignore_eos": True}},
        {"extra_body": {"skip_special_tokens": False, "allowed_token_ids": [1, 2, 500]}},
        {"extra_body": {"add_special_tokens": False, "min_tokens": 5, "bad_words": ["the"]}},
        {"seed": -1, "temperature": 2.0, "max_tokens": 60},
    ],
    ids=str,
)
def test_the_streamed_completion_is_the_whole_one(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    request = {**GREEDY, **fields}
    complete = whole(client, **request)
    assert joined(client, **request) == approximately(complete)
    prompts = request["prompt"] if isinstance(request["prompt"], list) else [request["prompt"]]
    num_prompts = 1 if isinstance(prompts[0], int) else len(prompts)
    assert sorted(complete) == list(range(num_prompts * request.get("n", 1)))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in complete.values())


def test_the_body_has_openais_shape(client: openai.OpenAI) -> None:
    completion = client.completions.create(**GREEDY)
    assert completion.id.startswith("cmpl-")
    assert (completion.object, completion.model) == ("text_completion", "tiny")
    assert completion.created > 1_700_000_000
    assert completion.choices[0].finish_reason == "length"


def test_usage_counts_a_prompt_once_and_every_choices_tokens(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    usage = client.completions.create(**{**GREEDY, "prompt": [PROMPT, "x"], "n": 3, "max_tokens": 5}).usage
    assert usage is not None
    assert usage.prompt_tokens == len(tokenizer.encode(PROMPT)) + len(tokenizer.encode("x"))
    assert usage.completion_tokens == 2 * 3 * 5
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_usage_ends_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    request = {**GREEDY, "n": 2, "max_tokens": 5}
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == client.completions.create(**request).usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    without = list(client.completions.create(**request, stream=True))
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in without)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    ask = joined if stream else whole
    full = ask(client, **GREEDY)[0]["text"]
    stop = full[10:14]
    cut = ask(client, **GREEDY, stop=[stop, "never there"], extra_body={"return_token_ids": True})[0]
    assert cut["text"] == full[: full.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = ask(client, **GREEDY, stop=stop, extra_body={"include_stop_str_in_output": True})[0]
    assert kept["text"] == full[: full.index(stop) + len(stop)]
    assert len(cut["token_ids"]) < 24


def test_a_stop_token_ends_the_text_and_is_told(client: openai.OpenAI) -> None:
    token_ids = whole(client, **GREEDY, extra_body={"return_token_ids": True})[0]["token_ids"]
    stop = token_ids[3]
    body = {"return_token_ids": True, "stop_token_ids": [stop]}
    cut = whole(client, **GREEDY, extra_body=body)[0]
    assert cut["token_ids"] == token_ids[: token_ids.index(stop) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


def test_an_echo_is_the_prompt_as_it_was_sent(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    plain = whole(client, **GREEDY)[0]["text"]
    assert whole(client, **GREEDY, echo=True)[0]["text"] == PROMPT + plain
    token_ids = tokenizer.encode(PROMPT)
    assert whole(client, **{**GREEDY, "prompt": token_ids}, echo=True)[0]["text"] == PROMPT + plain
    special = "<|im_start|>user\nhi"
    assert whole(client, **{**GREEDY, "prompt": special}, echo=True)[0]["text"].startswith(special)


def test_logprobs_name_each_token_where_it_begins(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    choice = whole(client, **GREEDY, echo=True, logprobs=2, extra_body={"return_token_ids": True})[0]
    logprobs, text = choice["logprobs"], choice["text"]
    token_ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert len(token_ids) == len(tokenizer.encode(PROMPT)) + 24
    assert all(len(logprobs[name]) == len(token_ids) for name in logprobs)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
    for token, logprob, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert top[token] == logprob
        assert 1 <= len(top) <= 3
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)
    assert any(token.startswith("bytes:") for token in logprobs["tokens"])  # the emoji is several tokens


def test_greedy_takes_the_likeliest_token(client: openai.OpenAI) -> None:
    logprobs = whole(client, **GREEDY, logprobs=1)[0]["logprobs"]
    assert all(
        top == {token: logprob}
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
    )


def test_prompt_logprobs_agree_with_the_echoed_ones(client: openai.OpenAI) -> None:
    choice = whole(
        client, **GREEDY, echo=True, logprobs=0, extra_body={"prompt_logprobs": 3, "return_token_ids": True}
    )[0]
    own = choice["prompt_logprobs"]
    assert own[0] is None
    assert len(own) == len(choice["prompt_token_ids"])
    for token_id, entry, echoed in zip(
        choice["prompt_token_ids"][1:], own[1:], choice["logprobs"]["token_logprobs"][1:], strict=False
    ):
        assert entry[str(token_id)]["logprob"] == echoed
        assert 3 <= len(entry) <= 4
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])


def test_a_seed_repeats_and_choices_draw_from_seed_plus_their_index(client: openai.OpenAI) -> None:
    request = {**GREEDY, "temperature": 1.0}
    three = whole(client, **request, n=3, seed=5)
    assert len({choice["text"] for choice in three.values()}) == 3
    assert whole(client, **request, n=3, seed=5) == three
    for index in range(3):
        assert whole(client, **request, seed=5 + index)[0]["text"] == three[index]["text"]
    assert whole(client, **request, n=2, seed=2**63 - 1)[1] == whole(client, **request, seed=-(2**63))[0] | {}


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    texts = {choice["text"] for choice in whole(client, **{**GREEDY, "temperature": 1.0}, n=4).values()}
    assert len(texts) == 4


def test_allowed_token_ids_and_logit_bias_steer_the_output(client: openai.OpenAI) -> None:
    allowed = whole(client, **GREEDY, extra_body={"allowed_token_ids": [500, 600], "return_token_ids": True})[0]
    assert set(allowed["token_ids"]) <= {500, 600}
    biased = whole(client, **GREEDY, logit_bias={"777": 100}, extra_body={"return_token_ids": True})[0]
    assert biased["token_ids"] == [777] * 24


def test_bad_words_do_not_appear(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = whole(client, **GREEDY)[0]["text"]
    token_ids = whole(client, **GREEDY, extra_body={"return_token_ids": True})[0]["token_ids"]
    word = next(w for t in token_ids if (w := tokenizer.token_text(t).strip()).isalpha() and w.isascii() and len(w) > 2)
    assert word in text
    without = whole(client, **GREEDY, extra_body={"bad_words": [word], "return_token_ids": True})[0]["token_ids"]
    banned = {tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in (word, " " + word)}
    for sequence in banned:
        windows = [tuple(without[i : i + len(sequence)]) for i in range(len(without))]
        assert sequence not in windows


def test_special_tokens_show_only_when_asked_for(client: openai.OpenAI) -> None:
    body = {"allowed_token_ids": [1], "ignore_eos": True}  # <|im_start|>
    assert whole(client, **GREEDY, extra_body=body)[0]["text"] == ""
    shown = whole(client, **GREEDY, extra_body={**body, "skip_special_tokens": False})[0]["text"]
    assert shown == "<|im_start|>" * 24


def test_end_of_sequence_stops_unless_it_is_ignored_or_too_early(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    request = {**GREEDY, "logit_bias": {str(end): 100}}
    body = {"return_token_ids": True}
    stopped = whole(client, **request, extra_body=body)[0]
    assert (stopped["token_ids"], stopped["text"], stopped["finish_reason"]) == ([end], "", "stop")
    ignored = whole(client, **request, extra_body={**body, "ignore_eos": True})[0]
    assert (ignored["token_ids"], ignored["finish_reason"]) == ([end] * 24, "length")
    late = whole(client, **request, extra_body={**body, "min_tokens": 3})[0]
    assert len(late["token_ids"]) == 4
    assert late["token_ids"][-1] == end
    assert end not in late["token_ids"][:-1]


def test_max_tokens_defaults_to_openais_sixteen(client: openai.OpenAI) -> None:
    usage = client.completions.create(model="tiny", prompt=PROMPT, logit_bias={"777": 100}).usage
    assert usage is not None
    assert usage.completion_tokens == 16


def test_a_stream_ends_with_done(server: LiveServer) -> None:
    lines = [line for line in server.post("/v1/completions", {**GREEDY, "stream": True}).text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1


def test_many_clients_at_once_get_what_each_gets_alone_and_every_page_returns(
    server: LiveServer, client: openai.OpenAI
) -> None:
    requests = [{**GREEDY, "prompt": [500 + 7 * i] * (1 + 5 * i), "max_tokens": 40, "seed": i} for i in range(12)]
    for i in range(0, 12, 3):
        requests[i]["temperature"] = 1.0
    alone = [whole(client, **request)[0]["text"] for request in requests]

    def ask(index: int) -> str | None:
        if index % 4 == 1:  # leaves after two chunks
            with client.completions.create(**requests[index], stream=True) as stream:
                next(stream)
                next(stream)
            return None
        return (joined if index % 2 else whole)(client, **requests[index])[0]["text"]

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [None if i % 4 == 1 else alone[i] for i in range(12)]
    deadline = time.monotonic() + 20
    while server.metric("pages_active") != 0:
        assert time.monotonic() < deadline, "pages are still held"
        time.sleep(0.02)
    cached = server.metric("pages_cached")
    assert server.metric("pages_free") + cached == server.metric("pages_total") == 64
