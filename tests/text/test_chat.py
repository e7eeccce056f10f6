"""Chat rendering: what a template sees, what is mended, what is refused; real templates are in the reference test."""

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_metadata import tiny_metadata

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate, pick_template
from jaxserve.text.gguf_tokenizer import build_gguf_tokenizer
from jaxserve.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '' }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=special_tokens, now=lambda: datetime(2026, 3, 7))


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]


def test_embedded_models_template(smollm2: Tokenizer) -> None:
    chat = pick_template(smollm2, None)
    assert chat is not None
    assert chat.render(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert pick_template(smollm2, None) is chat  # compiled once


def test_template_sees_what_transformers_shows_it() -> None:
    seen = template(
        "{{ bos_token }}|{{ eos_token is defined }}|{{ tools is defined }}{{ tools is none }}|{{ documents is none }}|"
        "{{ add_generation_prompt }}|{{ mood }}|{{ strftime_now('%Y') }}|{{ messages[0]|tojson }}",
        bos_token="<s>",
    )
    message = {"role": "user", "content": "é", "name": None}
    shown = '{"role": "user", "content": "é"}'
    assert seen.render([message], mood="grim") == f"<s>|False|TrueTrue|True|True|grim|2026|{shown}"
    assert seen.render([message], bos_token="<B>").startswith("<B>|")
    assert message == {"role": "user", "content": "é", "name": None}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_goes_by_each_of_its_names(key: str) -> None:
    seen = template("{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}")
    assert seen.render([{"role": "assistant", key: "why"}]) == "why|why"


def test_keyword_arguments_do_not_replace_what_the_call_gives() -> None:
    seen = template("{{ tools }}{{ messages|length }}")
    with pytest.raises(TypeError):
        seen.render(USER, **{"messages": []})


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_absent_content_is_empty_where_the_template_needs_one(content: dict[str, Any]) -> None:
    messages = [*USER, {"role": "assistant", **content}, *USER]
    assert template(CHATML).render(messages) == "<user>Hi</><assistant></><user>Hi</><assistant>"
    tolerant = template("{% for m in messages %}{{ 'content' in m }}{% endfor %}")
    assert tolerant.render(messages) == "TrueFalseTrue"  # not touched where it does not fail


def test_first_failure_is_reported_when_mending_does_not_help() -> None:
    failing = template("{{ messages[0].content + 'x' }}{{ raise_exception('no, ' ~ messages[0].content) }}")
    with pytest.raises(InvalidRequestError, match="has no attribute 'content'"):
        failing.render([{"role": "user"}])


@pytest.mark.parametrize(
    ("source", "wants_mapping"),
    [
        ("{{ messages[1].tool_calls[0].function.arguments|tojson }}", True),  # would write JSON in JSON
        ("{% for k, v in messages[1].tool_calls[0].function.arguments|items %}{{ k }}={{ v }}{% endfor %}", True),
        ("{{ 'ARGS' + messages[1].tool_calls[0].function.arguments }}", False),  # fails on a mapping
        ("{% set a = messages[1].tool_calls[0].function.arguments %}{{ a if a is string else a|tojson }}", False),
        ("{{ messages[1].content }}", False),  # shows no calls
        ("{{ raise_exception('no tools') }}", False),
    ],
)
def test_what_arguments_a_template_wants_is_found_by_trying(source: str, wants_mapping: bool) -> None:
    assert template(source).wants_argument_mappings == wants_mapping


def test_json_text_arguments_become_a_mapping_where_wanted() -> None:
    wants = template("{{ messages[1].tool_calls[0].function.arguments|tojson }}")
    assert wants.render(call('{"a": [1, "é"]}')) == '{"a": [1, "é"]}'
    assert wants.render(call({"a": 1})) == '{"a": 1}'
    assert wants.render(call("")) == wants.render(call(" \n")) == "{}"
    assert wants.render(call("[1]")) == '"[1]"'  # no object: the template's to judge
    assert wants.render(call("{broken")) == '"{broken"'
    assert wants.render(call(None)) == "null"  # does not fail, so it is not mended
    takes_text = template("{{ 'ARGS' + messages[1].tool_calls[0].function.arguments }}")
    assert takes_text.render(call('{"a":1}')) == 'ARGS{"a":1}'


def test_null_arguments_are_empty_where_the_template_needs_them() -> None:
    loops = template("{% for k in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}{% endfor %}.")
    assert loops.render(call(None)) == "."


@pytest.mark.parametrize("calls", [None, [], {}, "x", [3], [{"function": 3}], [{}]])
def test_misshapen_tool_calls_are_the_templates_to_judge(calls: Any) -> None:
    wants = template("{{ messages[1].tool_calls[0].function.arguments|tojson if messages|length > 1 }}ok")
    assert wants.wants_argument_mappings
    assert wants.render([{"role": "assistant", "content": "", "tool_calls": calls}]) == "ok"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("The answer is", "<user>Hi</><assistant>The answer is"),
        ("The answer is  ", "<user>Hi</><assistant>The answer is  "),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "<user>Hi</><assistant>ab"),
    ],
)
def test_final_message_is_left_open(content: Any, text: str) -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}</>{% endfor %}"
    )
    messages = [*USER, {"role": "assistant", "content": content}]
    before = json.dumps(messages)
    chat = template(source)
    assert chat.render(messages, add_generation_prompt=False, continue_final_message=True) == text
    assert json.dumps(messages) == before


def test_trimming_template_leaves_the_final_message_without_its_last_space() -> None:
    trims = template("{% for m in messages %}[{{ m.content|trim }}]{% endfor %}")
    messages = [*USER, {"role": "assistant", "content": "so  "}]
    assert trims.render(messages, add_generation_prompt=False, continue_final_message=True) == "[Hi][so"


@pytest.mark.parametrize(
    ("source", "last", "words"),
    [
        ("{{ messages[0].content }}", "x", "does not show the final message"),
        ("{{ messages[-1].content|upper }}", "x", "does not show the final message"),
        (CHATML, None, "no text to go on with"),
        (CHATML, [], "no text to go on with"),
        (CHATML, [{"type": "image"}], "no text to go on with"),
    ],
)
def test_final_message_that_cannot_be_continued_is_refused(source: str, last: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        template(source).render(
            [*USER, {"role": "assistant", "content": last}], add_generation_prompt=False, continue_final_message=True
        )


def test_continuing_excludes_a_generation_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other") as caught:
        template(CHATML).render(USER, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "param"), [([], "messages"), ([3], "messages[0]"), ([*USER, None], "messages[1]")]
)
def test_messages_of_a_wrong_shape_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(CHATML).render(messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must <alternate>') }}", "Roles must <alternate>"),
        ("{{ messages[0].content.nope.x }}", "has no attribute 'nope'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deep"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "for more than 0.5 seconds"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "wrote more than 16777216 characters"),
    ],
)
def test_templates_own_words_reach_the_client(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.text.chat.MAX_RENDER_SECONDS", 0.5)
    with pytest.raises(InvalidRequestError) as caught:
        template("{% if messages|length == 1 %}" + source + "{% endif %}").render(USER)
    assert words in caught.value.message
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ x", "{{ 1|zork }}", "{% do x %}", "{% break %}"])
def test_source_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="the chat template"):
        template(source)


def test_tool_template_is_taken_when_tools_are_given_even_none() -> None:
    metadata = tiny_metadata() | {"tokenizer.chat_template.tool_use": "TOOLS"}
    tokenizer = Tokenizer(build_gguf_tokenizer(Path("x.gguf"), metadata))

    def text(tools: Any) -> str:
        chat = pick_template(tokenizer, tools)
        assert chat is not None
        return chat.render(USER, tools=tools)

    assert text(None) == "<|start|>Hi"
    assert text([]) == text([{"type": "function"}]) == "TOOLS"


def test_tokenizer_without_a_template_has_none() -> None:
    metadata = {key: value for key, value in tiny_metadata().items() if "chat_template" not in key}
    assert pick_template(Tokenizer(build_gguf_tokenizer(Path("x.gguf"), metadata)), None) is None


def test_one_template_renders_in_many_threads_at_once() -> None:
    chat = template("{% for m in messages %}{% set x = m.content ~ '.' %}{{ x }}{% endfor %}")
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            text = chat.render([{"role": "user", "content": name}] * 20)
            if text != (name + ".") * 20:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
