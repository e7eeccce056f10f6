"""POST /v1/chat/completions through the real client: every parameter, and streams that join to the whole answer."""

from collections import defaultdict
from typing import Any

import openai
import pytest
from live_server import LiveServer
from test_server_completions import approximately

from jaxserve.text.chat import pick_template
from jaxserve.text.tokenizer import Tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2? 🎉"},
]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
BODY_FIELDS = ("prompt_token_ids", "prompt_logprobs")


def joined(client: openai.OpenAI, **request: Any) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """A streamed answer put together again, and checked for OpenAI's order: role, content, finish reason."""
    choices: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"content": "", "finish_reason": None, "stop_reason": None, "logprobs": None, "token_ids": []}
    )
    about_prompt: dict[str, Any] = {}
    seen_roles = set()
    for chunk in client.chat.completions.create(**request, stream=True):
        assert chunk.object == "chat.completion.chunk"
        for name in BODY_FIELDS:
            if name in (chunk.model_extra or {}):
                assert about_prompt.setdefault(name, chunk.model_extra[name]) == chunk.model_extra[name]
        for choice in chunk.choices:
            whole_choice = choices[choice.index]
            assert whole_choice["finish_reason"] is None, "a chunk after the finish reason"
            if choice.delta.role is not None:
                assert choice.index not in seen_roles
                assert (choice.delta.role, choice.delta.content) == ("assistant", "")
                seen_roles.add(choice.index)
                continue
            assert choice.index in seen_roles, "content before the role"
            whole_choice["content"] += choice.delta.content or ""
            whole_choice["token_ids"] += choice.model_extra.get("token_ids", [])
            if choice.logprobs is not None:
                whole_choice["logprobs"] = (whole_choice["logprobs"] or []) + choice.logprobs.model_dump()["content"]
            if choice.finish_reason is not None:
                assert choice.delta.content is None
                whole_choice["finish_reason"] = choice.finish_reason
                whole_choice["stop_reason"] = choice.model_extra["stop_reason"]
    return dict(choices), about_prompt


def whole(client: openai.OpenAI, **request: Any) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    answer = client.chat.completions.create(**request)
    choices = {
        choice.index: {
            "content": choice.message.content,
            "finish_reason": choice.finish_reason,
            "logprobs": None if choice.logprobs is None else choice.logprobs.model_dump()["content"],
            "token_ids": [],
            **choice.model_extra,
        }
        for choice in answer.choices
    }
    extra = answer.model_extra or {}
    return choices, {name: extra[name] for name in BODY_FIELDS if name in extra}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "seed": 1, "n": 3},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 4, "n": 2},
        {"logprobs": True, "top_logprobs": 20, "max_completion_tokens": 2},
        {"max_completion_tokens": None, "max_tokens": 5},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"logit_bias": {"100": 100}},
        {"logit_bias": {"2": 100}, "logprobs": True},
        {"extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3}, "temperature": 1.2, "seed": 9},
        {"extra_body": {"prompt_logprobs": 1, "return_token_ids": True}, "n": 2},
        {"extra_body": {"skip_special_tokens": False, "ignore_eos": True, "allowed_token_ids": [1, 2, 500]}},
        {"extra_body": {"add_generation_prompt": False}},
        {"extra_body": {"bad_words": ["the"], "min_tokens": 3, "chat_template_kwargs": {"unused": 1}}},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "It"}],
            "extra_body": {"continue_final_message": True},
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]}]},
        {"tools": [], "user": "me", "response_format": {"type": "text"}, "store": False, "service_tier": "auto"},
        {"seed": -1, "temperature": 2.0, "max_completion_tokens": 40},
    ],
    ids=str,
)
def test_the_streamed_answer_is_the_whole_one(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    request = {**GREEDY, **fields}
    choices, about_prompt = whole(client, **request)
    streamed, streamed_about_prompt = joined(client, **request)
    assert streamed == approximately(choices)
    assert streamed_about_prompt == approximately(about_prompt)
    assert sorted(choices) == list(range(request.get("n", 1)))
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices.values())


def test_the_body_has_openais_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    message = answer.choices[0].message
    assert (message.role, message.refusal, message.tool_calls) == ("assistant", None, None)
    assert answer.choices[0].finish_reason == "length"


def test_the_prompt_is_the_rendered_template_with_one_bos_at_most(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    _, about_prompt = whole(client, **GREEDY, extra_body={"return_token_ids": True})
    template = pick_template(tokenizer, None)
    assert template is not None
    assert about_prompt["prompt_token_ids"] == tokenizer.encode_chat(template.render(MESSAGES))


def test_usage_counts_the_prompt_once_and_every_choices_tokens(client: openai.OpenAI) -> None:
    request = {**GREEDY, "n": 3, "max_completion_tokens": 4}
    usage = client.chat.completions.create(**request).usage
    one = client.chat.completions.create(**{**request, "n": 1}).usage
    assert usage is not None
    assert one is not None
    assert usage.prompt_tokens == one.prompt_tokens > 0
    assert (usage.completion_tokens, one.completion_tokens) == (12, 4)
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_usage_ends_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    request = {**GREEDY, "n": 2}
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == client.chat.completions.create(**request).usage
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    without = list(client.chat.completions.create(**request, stream=True))
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in without)


@pytest.mark.parametrize("ask", [joined, whole])
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, ask: Any) -> None:
    full = ask(client, **GREEDY)[0][0]["content"]
    stop = full[8:11]
    cut = ask(client, **GREEDY, stop=stop, logprobs=True)[0][0]
    assert cut["content"] == full[: full.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert len(cut["logprobs"]) < 20


def test_logprobs_carry_token_bytes_and_the_wanted_alternatives(client: openai.OpenAI) -> None:
    request = {**GREEDY, "logprobs": True, "top_logprobs": 3, "extra_body": {"skip_special_tokens": False}}
    choice = whole(client, **request)[0][0]
    entries = choice["logprobs"]
    assert len(entries) == 20
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == choice["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        ordered = [top["logprob"] for top in entry["top_logprobs"]]
        assert ordered == sorted(ordered, reverse=True)
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]  # greedy
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_a_continued_message_goes_on_without_a_new_header(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    body = {"continue_final_message": True, "return_token_ids": True}
    _, about_prompt = whole(client, **{**GREEDY, "messages": messages}, extra_body=body)
    prompt = tokenizer.decode(about_prompt["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nThe answer is")


def test_without_max_tokens_the_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**request)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_the_embedded_model_names_the_capital_of_france(embedded_server: LiveServer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    request: dict[str, Any] = {"model": "smollm2-135m", "messages": messages, "temperature": 0}
    with embedded_server.openai() as client:
        choices, _ = whole(client, **request)
        streamed, _ = joined(client, **request)
    assert "Paris" in choices[0]["content"]
    assert choices[0]["finish_reason"] == "stop"
    assert streamed == choices
