"""Request bodies: every wrong field is named, known parameters that are not implemented are refused unless no-ops."""

import json
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams
from server.api.body import parse_body
from server.api.protocol import ChatBody, CompletionBody

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({**COMPLETION, **fields}).encode())


def test_defaults_are_openais() -> None:
    assert chat().sampling_params() == SamplingParams()
    assert completion().sampling_params() == SamplingParams(max_tokens=16)


def test_null_stands_for_the_default_of_every_optional_field() -> None:
    for schema, body in ((ChatBody, CHAT), (CompletionBody, COMPLETION)):
        optional = {name: None for name, field in schema.model_fields.items() if not field.is_required()}
        optional |= dict.fromkeys(schema.no_ops)
        with_nulls = parse_body(schema, json.dumps({**body, **optional}).encode())
        assert with_nulls == parse_body(schema, json.dumps(body).encode())


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": -5,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 3,
        "priority": -3,
        "cache_salt": "s",
        "deadline_ms": 5000,
        "queue_timeout_ms": 400,
    }
    lists: dict[str, Any] = {
        "allowed_token_ids": [1, 2],
        "bad_words": ["x"],
        "stop": ["a", "b"],
        "stop_token_ids": [3],
    }
    expected = SamplingParams(
        **fields, **{name: tuple(value) for name, value in lists.items()}, logit_bias={4: 1.5}, logprobs=2
    )
    shared = {**fields, **lists, "logit_bias": {"4": 1.5}}
    assert chat(**shared, logprobs=True, top_logprobs=2).sampling_params() == expected
    assert completion(**shared, logprobs=2).sampling_params() == expected


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="a").sampling_params().stop == ("a",)


def test_chat_logprobs_without_alternatives_ask_for_the_chosen_token_only() -> None:
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=False).sampling_params().logprobs is None


def test_an_echo_with_logprobs_asks_for_the_prompts_too() -> None:
    assert completion(echo=True, logprobs=2).sampling_params().prompt_logprobs == 2
    assert completion(echo=True).sampling_params().prompt_logprobs is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([[1], "b"], ((1,), "b")),
    ],
)
def test_prompts_come_as_text_or_token_ids_alone_or_in_lists(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


def refusal(schema: Any, fields: dict[str, Any]) -> InvalidRequestError:
    base = CHAT if schema is ChatBody else COMPLETION
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(schema, json.dumps({**base, **fields}).encode()).sampling_params()
    return caught.value


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 10**25),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", [1]),
        ("priority", 101),
        ("priority", -101),
        ("priority", 1.0),
        ("user", "x" * 257),
        ("user", 5),
        ("cache_salt", "x" * 2**20),
        ("cache_salt", ""),
        ("deadline_ms", 0),
        ("deadline_ms", -1),
        ("queue_timeout_ms", 10**9),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", "2"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 10**30),
        ("max_tokens", 5.0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", "1"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [True]),
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", [1]),
        ("ignore_eos", 1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("stream", "yes"),
        ("model", 5),
        ("model", None),
        ("temprature", 1),
        ("foo", None),
    ],
)
@pytest.mark.parametrize("schema", [ChatBody, CompletionBody])
def test_a_wrong_value_is_refused_by_field(schema: Any, param: str, value: Any) -> None:
    error = refusal(schema, {param: value})
    assert error.param == param
    assert param in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 4097}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 128}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_a_wrong_completion_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(CompletionBody, fields).param == param


USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_a_wrong_chat_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(ChatBody, fields).param == param


@pytest.mark.parametrize(
    ("param", "harmless", "refused"),
    [
        ("safety_identifier", "someone", 5),
        ("metadata", {"run": "7"}, {"run": 7}),
        ("prompt_cache_key", "k", 5),
        ("prompt_cache_retention", "in_memory", "24h"),
        ("prompt_cache_options", {}, {"ttl": "30m"}),
        ("service_tier", "auto", "priority"),
        ("store", False, True),
        ("store", False, 0),
        ("functions", [], [{"name": "f"}]),
        ("function_call", "none", {"name": "f"}),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("audio", None, {"voice": "x", "format": "wav"}),
        ("verbosity", "medium", "low"),
        ("reasoning_effort", None, "high"),
        ("prediction", None, {"type": "content", "content": "x"}),
        ("moderation", None, {"model": "x"}),
        ("web_search_options", None, {}),
    ],
)
def test_a_parameter_that_is_not_implemented_is_taken_only_as_a_no_op(param: str, harmless: Any, refused: Any) -> None:
    assert chat(**{param: harmless}) == chat()
    error = refusal(ChatBody, {param: refused})
    assert error.param == param
    assert json.dumps(refused)[:20] in error.message


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    error = refusal(ChatBody, {"max_token": 5})
    assert error.code == "unknown_parameter"
    assert "did you mean max_tokens?" in error.message


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"null"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="object"):
        parse_body(ChatBody, body)


@pytest.mark.parametrize("schema", [ChatBody, CompletionBody])
def test_a_missing_field_is_named(schema: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is missing") as caught:
        parse_body(schema, b"{}")
    assert caught.value.param == "model"


def test_a_megabyte_in_the_wrong_place_is_quoted_short() -> None:
    assert len(refusal(ChatBody, {"temperature": "x" * 10**6}).message) < 400


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


def test_an_answer_of_the_api_can_be_sent_back_as_it_is() -> None:
    answer = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "audio": None,
        "annotations": [],
        "function_call": None,
        "tool_calls": None,
    }
    message = chat(messages=[USER, answer, USER]).messages[1]
    assert message.for_template() == {"role": "assistant", "content": "hello"}


def test_tool_calls_of_earlier_turns_reach_the_template_as_they_were_sent() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "5", "tool_call_id": "1"}
    body = chat(messages=[USER, calls, result])
    assert [message.for_template() for message in body.messages] == [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        result,
    ]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}},
}


def test_the_model_is_told_of_the_tools_that_it_may_call() -> None:
    assert chat(tools=[TOOL]).shown_tools() == [TOOL]
    assert chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True).shown_tools() == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").shown_tools() is None
    assert chat(tools=[]).shown_tools() is None


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ("parallel_tool_calls", {"tools": [TOOL], "parallel_tool_calls": False}),
        ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
        ("tools[0]", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
        ("tools[0].function.strict", {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
        ("chat_template", {"chat_template": "x" * (2**16 + 1)}),
    ],
)
def test_what_tools_cannot_do_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        chat(**fields)
    assert error.value.param is not None
    assert error.value.param.startswith(param)
