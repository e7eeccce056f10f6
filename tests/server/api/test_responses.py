"""/v1/responses through the official client: events in order, what is stored, continued, cancelled and refused."""

from typing import Any

import openai
import pytest
from live_server import LiveServer

from jaxserve.text.chat import pick_template
from jaxserve.text.tokenizer import Tokenizer

ASK: dict[str, Any] = {"model": "tiny", "input": "Grüße 🎉", "temperature": 0, "max_output_tokens": 12}


def rendered(tokenizer: Tokenizer, *messages: tuple[str, str]) -> int:
    template = pick_template(tokenizer, None)
    assert template is not None
    text = template.render([{"role": role, "content": content} for role, content in messages])
    return len(tokenizer.encode_chat(text))


def test_a_response_has_openais_shape_and_its_own_text(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASK, metadata={"run": "7"})
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": ASK["input"]}], temperature=0, max_tokens=12
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.model) == ("incomplete", "response", "tiny")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.metadata == {"run": "7"}
    assert response.usage is not None
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert client.responses.retrieve(response.id) == response


@pytest.mark.parametrize(
    "fields", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"temperature": 1.0}], ids=str
)
def test_events_come_in_order_and_join_to_the_response(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    events = list(client.responses.create(**{**ASK, **fields}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    final = events[-1].response
    deltas = events[4:-4]
    assert "".join(event.delta for event in deltas) == final.output_text == events[-4].text
    assert final.status == "incomplete"
    assert final == client.responses.retrieve(final.id)
    assert events[0].response.id == final.id
    assert events[0].response.status == "in_progress"
    tops = [len(entry.top_logprobs) for event in deltas for entry in event.logprobs]
    assert tops == ([2] * 12 if "include" in fields else [])
    assert len(final.output[0].content[0].logprobs) == len(tops)


def test_the_sdks_own_stream_reader_follows(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASK) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == client.responses.create(**ASK).output_text


def test_a_conversation_goes_on_from_a_stored_response(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    first = client.responses.create(**ASK, instructions="Be brief.")
    second = client.responses.create(**{**ASK, "input": "More"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage is not None
    # The first one's instructions are not part of the conversation.
    assert second.usage.input_tokens == rendered(
        tokenizer, ("user", ASK["input"]), ("assistant", first.output_text), ("user", "More")
    )
    again = client.responses.create(
        **{
            **ASK,
            "input": [
                {"role": "user", "content": ASK["input"]},
                *[item.model_dump(exclude_none=True) for item in first.output],
                {"role": "user", "content": [{"type": "input_text", "text": "More"}]},
            ],
        }
    )
    assert again.usage is not None
    assert (again.output_text, again.usage.input_tokens) == (second.output_text, second.usage.input_tokens)


def test_what_is_not_stored_or_deleted_is_not_found(client: openai.OpenAI) -> None:
    unstored = client.responses.create(**ASK, store=False)
    deleted = client.responses.create(**ASK)
    client.responses.delete(deleted.id)
    for response_id in (unstored.id, deleted.id, "resp_unknown"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(response_id)
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**ASK, previous_response_id=response_id)
        assert error.value.param == "previous_response_id"


def test_a_stream_is_cancelled_from_another_connection(server: LiveServer, client: openai.OpenAI) -> None:
    aborted = server.metric("request_success_total", finished_reason="abort")
    final: Any = None
    with client.responses.create(**{**ASK, "input": "hi", "max_output_tokens": 90}, stream=True) as events:
        for event in events:
            if event.type == "response.created":
                assert client.responses.cancel(event.response.id).status == "cancelled"
            final = event
    assert final.type == "response.incomplete"
    assert final.response.status == "cancelled"
    assert client.responses.retrieve(final.response.id).status == "cancelled"
    assert server.metric("request_success_total", finished_reason="abort") == aborted + 1
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(final.response.id)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("truncation", {"truncation": "auto"}),
        ("reasoning", {"reasoning": {"effort": "high"}}),
        ("text.format.type", {"text": {"format": {"type": "json_object"}}}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools", {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}),  # its template
        ("include[0]", {"include": ["file_search_call.results"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("stream_options", {"stream_options": {"include_obfuscation": False}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_output_tokens", {"max_output_tokens": 10**6}),
        ("input", {"input": []}),
        ("metadata", {"metadata": {str(i): "x" for i in range(17)}}),
        ("metadata.a", {"metadata": {"a": "x" * 513}}),
        ("input", {"input": "word " * 200}),
        ("temperature", {"temperature": -1}),
        ("n", {"n": 2}),
        ("messages", {"messages": []}),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(server: LiveServer, param: str, fields: dict[str, Any]) -> None:
    reply = server.post("/v1/responses", {**ASK, **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "x"},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]},
        {"role": "user"},
        "text",
    ],
    ids=str,
)
def test_an_item_of_another_kind_is_refused(server: LiveServer, item: Any) -> None:
    reply = server.post("/v1/responses", {**ASK, "input": [{"role": "user", "content": "x"}, item]})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("input")
