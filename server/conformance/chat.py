"""Chat: roles, parts and templates."""

from typing import Any

from server.conformance.case import Case, SkippedError, expect
from server.conformance.client import CHAT, Server, shorten

KIND = "chat"
USER = {"role": "user", "content": "Say hello."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

# Conversations that a server must serve, or refuse in its template's own words (400): never fail on.
CONVERSATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a system message", {"messages": [{"role": "system", "content": "Be brief."}, USER]}),
    ("a developer message", {"messages": [{"role": "developer", "content": "Be brief."}, USER]}),
    ("several turns", {"messages": [USER, {"role": "assistant", "content": "Hello."}, USER]}),
    ("two user messages in a row", {"messages": [USER, USER]}),
    ("an empty message", {"messages": [{"role": "user", "content": ""}]}),
    ("text as a list of parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    ("a name", {"messages": [{**USER, "name": "ada"}]}),
    (
        "a tool call and its result",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ]
        },
    ),
    ("tools", {"messages": [USER], "tools": [TOOL]}),
    ("a very long system message", {"messages": [{"role": "system", "content": "Be kind. " * 40}, USER]}),
)


def _conversation(fields: dict[str, Any]) -> Any:
    async def run(server: Server) -> None:
        reply = await server.http.post(CHAT, json=server.chat_body(**fields))
        expect(reply.status_code in (200, 400), f"answered {reply.status_code}: {shorten(reply.text)}")
        if reply.status_code == 200:
            message = reply.json()["choices"][0]["message"]
            expect(message["role"] == "assistant", f"the answer's role is {message['role']!r}")

    return run


async def _parts_are_text(server: Server) -> None:
    whole = await server.chat(messages=[{"role": "user", "content": "Hello there"}])
    parts = [{"type": "text", "text": "Hello there"}]
    split = await server.chat(messages=[{"role": "user", "content": parts}])
    a, b = whole["usage"]["prompt_tokens"], split["usage"]["prompt_tokens"]
    expect(a == b, f"{a} tokens as a string, {b} as one part")


async def _answer_shape(server: Server) -> None:
    answer = await server.chat()
    expect(answer["object"] == "chat.completion", f"object is {answer['object']!r}")
    expect(answer["model"] == server.model, f"model is {answer['model']!r}")
    choice = answer["choices"][0]
    expect(choice["index"] == 0 and choice["finish_reason"] in ("stop", "length"), f"the choice is {choice}")


async def _image_is_refused(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    reply = await server.http.post(CHAT, json=server.chat_body(messages=[{"role": "user", "content": [part]}]))
    expect(reply.status_code in (200, 400, 422), f"answered {reply.status_code}: {shorten(reply.text)}")
    if reply.status_code == 200:
        raise SkippedError("this model sees images")


async def _continuation(server: Server) -> None:
    messages = [USER, {"role": "assistant", "content": "Hello"}]
    body = server.chat_body(messages=messages, continue_final_message=True, add_generation_prompt=False)
    reply = await server.http.post(CHAT, json=body)
    if reply.status_code in (400, 422) and "continue_final_message" in reply.text:
        raise SkippedError("no continue_final_message here")
    expect(reply.status_code == 200, f"answered {reply.status_code}: {shorten(reply.text)}")
    plain = await server.chat(messages=[*messages, USER])
    expect(reply.json()["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"], "nothing was left open")


async def _template_from_a_client(server: Server) -> None:
    template = "{% for i in range(1000000000) %}x{% endfor %}"
    reply = await server.http.post(CHAT, json=server.chat_body(chat_template=template))
    expect(reply.status_code in (400, 403, 422), f"an endless template from a client: {reply.status_code}")


async def _reserved_template_arguments(server: Server) -> None:
    reply = await server.http.post(CHAT, json=server.chat_body(chat_template_kwargs={"messages": []}))
    expect(reply.status_code in (400, 422), f"chat_template_kwargs may replace messages: {reply.status_code}")


async def _longer_conversations_cost_more(server: Server) -> None:
    short = (await server.chat())["usage"]["prompt_tokens"]
    turns = [USER, {"role": "assistant", "content": "Hello."}, USER]
    longer = (await server.chat(messages=turns))["usage"]["prompt_tokens"]
    expect(longer > short, f"one turn has {short} tokens, three have {longer}")


CASES = (
    *(
        Case(kind=KIND, claim=f"a conversation with {what} is answered, or refused with 400", run=_conversation(fields))
        for what, fields in CONVERSATIONS
    ),
    *(
        Case(kind=KIND, claim=claim, run=run)
        for claim, run in (
            ("a text part counts as the text", _parts_are_text),
            ("an answer names its model and its object", _answer_shape),
            ("an image is refused where the model sees none", _image_is_refused),
            ("continue_final_message leaves the last message open", _continuation),
            ("an endless template from a client is refused", _template_from_a_client),
            ("chat_template_kwargs cannot replace the messages", _reserved_template_arguments),
            ("more turns are more prompt tokens", _longer_conversations_cost_more),
        )
    ),
)
