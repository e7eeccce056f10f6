"""What of a conversation reaches the chat template, and what its refusals become; read off the render route."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import LiveServer, serving

from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerSection
from server.engine.async_engine import AsyncEngine

# Shows tools as JSON, writes a call's arguments as JSON itself, and wants roles to alternate.
STRICT = """\
{%- if tools %}TOOLS
{%- for tool in tools %} {{ tool.function.name }}={{ tool.function.parameters | tojson }};{% endfor %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == "user" and not loop.first and messages[loop.index0 - 1].role == "user" %}
{{- raise_exception("roles must alternate: message " ~ loop.index0) }}
{%- endif %}
{{- "[" ~ m.role ~ "]" ~ (m.content if m.content is defined else "<none>") }}
{%- for call in m.tool_calls or [] %} CALL {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant{{ " " ~ mood if mood is defined }}]{% endif %}"""
# The same, but a call's arguments are pasted as the text that they came as.
PASTING = STRICT.replace("call.function.arguments | tojson", "call.function.arguments")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USER = {"role": "user", "content": "hi"}


def served(tokenizer: Tokenizer, template: str, **settings: Any) -> Iterator[LiveServer]:
    spec = dataclasses.replace(tokenizer.spec, chat_templates={"default": template})
    with serving(
        lambda engine: create_app(engine, Tokenizer(spec), ServerSection(**settings)),
        lambda: AsyncEngine(lambda _: FakeEngine()),  # type: ignore[arg-type,return-value]
    ) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture(scope="module")
def strict(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    yield from served(tokenizer, STRICT)


@pytest.fixture(scope="module")
def pasting(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    yield from served(tokenizer, PASTING, allow_chat_template=True)


def render(server: LiveServer, *messages: dict[str, Any], **fields: Any) -> str:
    body = {"model": "fake", "messages": list(messages), **fields}
    reply = server.post("/v1/chat/completions/render", body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["prompt"])


def refusal(server: LiveServer, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions/render", {"model": "fake", "messages": list(messages), **fields})
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


def test_every_role_and_every_form_of_content_arrives(strict: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render(
        strict,
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "assistant"},
    )
    call = '[assistant]<none> CALL weather {"city": "Oslo"}'
    assert text == f"[system]s[developer]d[user]a\nb{call}[tool]21[assistant]<none>[assistant]"


@pytest.mark.parametrize("name", ["strict", "pasting"])
def test_call_arguments_have_the_form_that_the_template_wants(name: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(name)
    text = render(server, USER, {"role": "assistant", "tool_calls": [CALL]}, USER)
    assert 'CALL weather {"city": "Oslo"}' in text


def test_tools_are_shown_unless_none_may_be_called(strict: LiveServer) -> None:
    shown = 'TOOLS weather={"type": "object", "properties": {"city": {"type": "string"}}};'
    assert render(strict, USER, tools=[TOOL]).startswith(shown)
    assert render(strict, USER, tools=[TOOL], tool_choice="auto").startswith(shown)
    assert "TOOLS" not in render(strict, USER, tools=[TOOL], tool_choice="none")
    assert "TOOLS" not in render(strict, USER, tools=[])


def test_tools_that_the_template_cannot_show_are_refused(server: LiveServer) -> None:
    error = server.post("/v1/chat/completions", {"model": "tiny", "messages": [USER], "tools": [TOOL]}).json()["error"]
    assert error["param"] == "tools"


def test_the_templates_own_words_come_with_its_refusal(strict: LiveServer) -> None:
    error = refusal(strict, USER, USER)
    assert "roles must alternate: message 1" in error["message"]
    assert error["param"] == "messages"


def test_the_end_of_the_prompt_is_the_clients_choice(strict: LiveServer) -> None:
    said = {"role": "assistant", "content": "It is "}
    assert render(strict, USER) == "[user]hi[assistant]"
    assert render(strict, USER, add_generation_prompt=False) == "[user]hi"
    assert render(strict, USER, said, continue_final_message=True) == "[user]hi[assistant]It is "
    assert render(strict, USER, said, continue_final_message=True, add_generation_prompt=False).endswith("It is ")
    error = refusal(strict, USER, said, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


def test_template_variables_arrive_but_not_over_the_requests_own(strict: LiveServer) -> None:
    assert render(strict, USER, chat_template_kwargs={"mood": "kind"}) == "[user]hi[assistant kind]"
    for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
        assert refusal(strict, USER, chat_template_kwargs={name: []})["param"] == "chat_template_kwargs"


def test_a_template_comes_with_a_request_only_where_that_is_enabled(strict: LiveServer, pasting: LiveServer) -> None:
    template = "{{ messages[0].content | upper }}"
    assert render(pasting, USER, chat_template=template) == "HI"
    error = refusal(strict, USER, chat_template=template)
    assert error["param"] == "chat_template"
    assert "server.allow_chat_template" in error["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 'x' * 10**9 }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_hostile_template_is_a_400(pasting: LiveServer, template: str) -> None:
    refusal(pasting, USER, chat_template=template)
    assert render(pasting, USER) == "[user]hi[assistant]"


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/tokenize"])
def test_a_special_token_in_a_message_is_text_unless_configured(
    tokenizer: Tokenizer, strict: LiveServer, path: str
) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "a<|im_end|>b"}]}
    name = "tokens" if path == "/tokenize" else "prompt_token_ids"
    end = tokenizer.spec.backend.token_to_id("<|im_end|>")
    token_ids = strict.post(path, body).json()[name]
    assert end not in token_ids
    assert tokenizer.decode(token_ids) == "[user]a<|im_end|>b[assistant]"
    for live in served(tokenizer, STRICT, special_tokens_in_messages=True):
        assert end in live.post(path, body).json()[name]
