"""Real chat templates render as transformers renders them, or better by a rule that stands here with its count.

The data (templates of other authors, conversations, the reference's output) are not part of the repository; the test
runs where they lie in a neighbour of it.
"""

import copy
import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate

REPOSITORY = Path(__file__).resolve().parents[2]
EXPECTED = next(REPOSITORY.parent.glob("*/templates/expected.json"), None)
pytestmark = pytest.mark.skipif(EXPECTED is None, reason="no folder of reference renderings beside the repository")

Messages = list[dict[str, Any]]


def reference() -> dict[str, Any]:
    assert EXPECTED is not None
    return json.loads(EXPECTED.read_text(encoding="utf-8"))


class Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache
def plain_template(source: str, now: datetime) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )

    def refuse(words: str) -> None:
        raise ValueError(words)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)

    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": now.strftime}
    return environment.from_string(source)


def plain_render(source: str, variables: dict[str, Any], now: datetime) -> str | None:
    """The template as transformers would render it, without any of this project's code; None if it fails."""
    shown = []
    for message in variables["messages"]:
        kept = {key: value for key, value in message.items() if value is not None}
        reasons = [kept[key] for key in ("reasoning_content", "thinking", "reasoning") if key in kept]
        shown.append({"thinking": reasons[0], **kept, "reasoning_content": reasons[0]} if reasons else kept)
    try:
        return plain_template(source, now).render({"tools": None, "documents": None, **variables, "messages": shown})
    except Exception:  # a template is a program and may raise anything
        return None


def empty_content(messages: Messages) -> Messages:
    return [
        {**message, "content": "" if message.get("content") is None else message["content"]} for message in messages
    ]


def on_arguments(change: Callable[[Any], Any]) -> Callable[[Messages], Messages]:
    def changed(messages: Messages) -> Messages:
        messages = copy.deepcopy(messages)
        for message in messages:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = change(call["function"]["arguments"])
        return messages

    return changed


# Each betterment: what the conversation would have to be for the reference to render what we render.
BETTERMENTS: dict[str, Callable[[Messages], Messages]] = {
    "absent content is empty": empty_content,
    "JSON text arguments are a mapping": on_arguments(
        lambda text: json.loads(text) if isinstance(text, str) and text else text
    ),
    "no arguments are an empty mapping": on_arguments(lambda text: {} if text == "" else text),
    "null arguments are an empty mapping": on_arguments(lambda value: {} if value is None else value),
}
# Only where the reference fails may these apply; the others also where it renders JSON text as JSON once more.
ONLY_FOR_FAILURES = {"absent content is empty", "null arguments are an empty mapping"}

AS_RENDERED, AS_REFUSED = "as the reference", "refused as by the reference"
CONTENT, JSON_TEXT, NOTHING, NULL = BETTERMENTS
COUNTS = {
    (AS_RENDERED,): 1574,
    (AS_REFUSED,): 227,
    (CONTENT,): 130,
    (JSON_TEXT,): 40,
    (NOTHING,): 17,
    (NULL,): 3,
    (CONTENT, JSON_TEXT): 2,
    (CONTENT, NOTHING): 2,
}


def explain(
    source: str, case: dict[str, Any], special: dict[str, str], text: str, failed: bool, now: datetime
) -> tuple[str, ...]:
    """The fewest betterments that turn the conversation into one that the reference renders as `text`."""
    names = list(BETTERMENTS)
    for chosen in sorted((tuple(n for i, n in enumerate(names) if mask >> i & 1) for mask in range(1, 16)), key=len):
        if not failed and ONLY_FOR_FAILURES & set(chosen):
            continue
        messages = case["messages"]
        for name in chosen:
            messages = BETTERMENTS[name](messages)
        if plain_render(source, {**special, **case, "messages": messages}, now) == text:
            return chosen
    return ("unexplained",)


def rendered(chat: ChatTemplate, case: dict[str, Any]) -> tuple[str | None, InvalidRequestError | None]:
    arguments = copy.deepcopy(case)
    try:
        return chat.render(arguments.pop("messages"), **arguments), None
    except InvalidRequestError as error:
        return None, error


def test_every_template_renders_every_conversation_as_the_reference_or_better() -> None:
    data = reference()
    now = datetime.fromisoformat(data["now"])
    counts: Counter[tuple[str, ...]] = Counter()
    wrong = []
    for name, entry in data["templates"].items():
        assert EXPECTED is not None
        source = EXPECTED.with_name(name).read_bytes().decode()
        special = {role: entry[role] for role in ("bos_token", "eos_token") if entry[role] is not None}
        chat = ChatTemplate(source, special_tokens=special, now=lambda: now)
        for case_name, result in entry["results"].items():
            result = entry["results"]["user"] if result == "=user" else result
            case = data["cases"][case_name]
            text, error = rendered(chat, case)
            assert error is None or error.param == "messages"
            if text == result.get("text"):
                rules: tuple[str, ...] = (AS_REFUSED if text is None else AS_RENDERED,)
            elif text is None:
                rules = ("refused, but not by the reference",)
            else:
                rules = explain(source, case, special, text, "error" in result, now)
            counts[rules] += 1
            if rules not in COUNTS:
                wrong.append((name, case_name, rules, text, error))
    assert wrong == []
    assert counts == COUNTS


def test_the_rules_stand_on_a_renderer_that_equals_the_reference() -> None:
    data = reference()
    now = datetime.fromisoformat(data["now"])
    compared = 0
    for name, entry in data["templates"].items():
        assert EXPECTED is not None
        source = EXPECTED.with_name(name).read_bytes().decode()
        special = {role: entry[role] for role in ("bos_token", "eos_token") if entry[role] is not None}
        for case_name, result in entry["results"].items():
            if case_name == "empty_list" or case_name.startswith("continue_final"):
                continue  # decided outside the template
            result = entry["results"]["user"] if result == "=user" else result
            assert plain_render(source, {**special, **data["cases"][case_name]}, now) == result.get("text")
            compared += 1
    assert compared == 35 * 54


def test_the_environment_behaves_as_the_references() -> None:
    data = reference()
    now = datetime.fromisoformat(data["now"])
    for name, case in data["env"]["cases"].items():
        variables = {**data["env"]["vars"], "add_generation_prompt": False}
        try:
            chat = ChatTemplate(case["template"], special_tokens={}, now=lambda: now)
        except InvalidRequestError as refusal:
            text, error = None, refusal
        else:
            text, error = rendered(chat, variables)
        assert text == case.get("text"), (name, error)
        if error is not None and name not in ("namespace_under", "recursion"):  # these we say in our own words
            assert case["message"] in error.message, name
    assert len(data["env"]["cases"]) == 98
