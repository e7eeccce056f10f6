"""/v1/messages through Anthropic's own client: the same answers as chat completions, in the other shape."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from live_server import TIMEOUT_S, LiveServer

ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "extra_body": {"temperature": 0},  # a client of this version knows the parameter no more
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Grüße 🎉"}],
}
BODY = {name: value for name, value in ASK.items() if name != "extra_body"}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def claude(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def chat(client: openai.OpenAI, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", temperature=0, max_tokens=12, messages=messages, **fields)


def test_a_message_is_the_chats_answer(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = claude.messages.create(**ASK)
    answer = chat(client, [{"role": "system", "content": "Be brief."}, *ASK["messages"]])
    assert [block.text for block in message.content] == [answer.choices[0].message.content]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == answer.usage.prompt_tokens
    assert message.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="tiny", system=ASK["system"], messages=ASK["messages"])
    assert counted.input_tokens == answer.usage.prompt_tokens


def test_blocks_are_the_conversation_that_a_chat_would_have(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    hint = {"type": "ephemeral"}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "A", "cache_control": hint}, {"type": "text", "text": "B"}],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}]},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    system = [{"type": "text", "text": "Be brief."}]
    message = claude.messages.create(**{**ASK, "system": system, "messages": messages})  # type: ignore[arg-type]
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer = chat(
        client,
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A\nB"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "21"},
            {"role": "user", "content": "and"},
            {"role": "assistant", "content": "It is"},
        ],
        extra_body={"continue_final_message": True},
    )
    assert message.content[0].text == answer.choices[0].message.content
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == answer.usage.prompt_tokens


def test_a_streamed_message_is_the_whole_one(server: LiveServer, claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    whole = claude.messages.create(**ASK)
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    raw = server.post("/v1/messages", {**BODY, "stream": True})
    assert raw.text.startswith("event: message_start\ndata: {")
    assert raw.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_message_before_it(claude: anthropic.Anthropic, stream: bool) -> None:
    text = claude.messages.create(**ASK).content[0].text
    stop = text[6:9]
    request = {**ASK, "stop_sequences": [stop]}
    if stream:
        with claude.messages.stream(**request) as events:
            cut = events.get_final_message()
    else:
        cut = claude.messages.create(**request)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 10**6}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "word " * 200}]}),
        ("role", {"messages": [{"role": "tool", "content": "x"}]}),
        (
            "tool_result",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        ),
        ("image", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("tools", {"tools": [TOOL]}),  # this model's template
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "any"}}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("temperature", {"temperature": -1}),
        ("service_tier", {"service_tier": "priority"}),
        ("max_completion_tokens", {"max_completion_tokens": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_form(server: LiveServer, word: str, fields: dict[str, Any], stream: bool) -> None:
    reply = server.post("/v1/messages", {**BODY, **fields, "stream": stream})
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert word in body["error"]["message"]


def test_another_model_and_another_method_are_told_in_anthropics_form(
    server: LiveServer, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.messages.create(**{**ASK, "model": "other"})
    assert error.value.type == "not_found_error"
    assert server.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
