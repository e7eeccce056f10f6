"""Files of requests: what they become, and that every complaint names its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.bench.dataset import Dataset, read_jsonl, read_sharegpt
from server.bench.errors import BenchError
from server.bench.workload import TokenLength


def jsonl(folder: Path, *lines: Any, **options: Any) -> Dataset:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    defaults: dict[str, Any] = {"api": "chat", "length": TokenLength(), "default_output_tokens": 64}
    return read_jsonl(path, **{**defaults, **options})


def test_bodies_go_out_as_they_are(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    chat = {"messages": [{"role": "user", "content": "Hi", "name": "x"}], "tools": [tool], "max_completion_tokens": 5}
    dataset = jsonl(tmp_path, chat, "", {"prompt": [1, 2, 3], "max_tokens": 7, "seed": 4}, {"prompt": "a", "n": 1})
    (first,), (second,), (third,) = (conversation.turns for conversation in dataset.conversations)
    assert first == chat
    assert second == {"prompt": [1, 2, 3], "max_tokens": 7, "seed": 4}
    assert third == {"prompt": "a", "max_tokens": 64}
    assert dataset.arrivals is None


def test_a_trace_has_arrivals_in_its_unit_and_at_its_speed(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 5, "output_length": 9} for at in (1000, 1500, 4000)]
    dataset = jsonl(tmp_path, *lines, time_unit="ms", speed=2.0)
    assert dataset.arrivals == (0.0, 0.25, 1.5)
    (turn,) = dataset.conversations[0].turns
    assert turn["max_tokens"] == 9
    assert len(turn["messages"][0]["content"].split()) == 5
    assert dataset.conversations[0] != dataset.conversations[1]  # or the cache would answer


def test_a_trace_of_the_simulator_is_a_trace_here(tmp_path: Path) -> None:
    lengths = {"arrival_s": 0.5, "prompt_tokens": 5, "output_tokens": 9}
    dataset = jsonl(tmp_path, lengths, {"arrival_s": 2, "prompt_token_ids": [7, 8], "output_tokens": 3})
    assert dataset.arrivals == (0.0, 1.5)
    assert dataset.conversations[0].turns[0]["max_tokens"] == 9
    assert dataset.conversations[1].turns == ({"prompt": [7, 8], "max_tokens": 3},)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2: Input should be a valid dictionary"),
        ({}, "line 2: one of prompt, messages and input_length is needed, not none"),
        ({"prompt": "a", "messages": [{"role": "user"}]}, "line 2: .* not prompt and messages"),
        ({"prompt": 5}, "line 2: prompt"),
        ({"messages": [{"content": "a"}]}, "line 2: messages.0.role"),
        ({"prompt": "a", "max_tokens": 0}, "line 2: max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "line 2: max_tokens"),
        ({"prompt": "a", "n": 2}, "line 2: n"),
        ({"prompt": "a", "timestamp": -1}, "line 2: timestamp"),
        ({"prompt": "a", "timestamp": 1}, "line 2 has a timestamp, unlike"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(BenchError, match=rf"requests\.jsonl, {message}"):
        jsonl(tmp_path, {"prompt": "fine"}, line)


def test_a_trace_that_runs_backwards_or_has_holes_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="line 3: timestamp 1 is before"):
        jsonl(tmp_path, *({"prompt": "a", "timestamp": at} for at in (0, 2, 1)))
    with pytest.raises(BenchError, match="line 2 has no timestamp"):
        jsonl(tmp_path, {"prompt": "a", "timestamp": 0}, {"prompt": "a"})


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"api": "chat", "length": TokenLength(), "default_output_tokens": 1}
    with pytest.raises(BenchError, match="No such file"):
        read_jsonl(tmp_path / "none", **options)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(BenchError, match="no request"):
        read_jsonl(tmp_path / "empty", **options)
    (tmp_path / "bytes").write_bytes(b'{"prompt": "a"}\n\xff\xfe\n')
    with pytest.raises(BenchError, match="line 2 is not UTF-8"):
        read_jsonl(tmp_path / "bytes", **options)


TALK = [
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "one two three"},
    {"from": "human", "value": "More"},
    {"from": "gpt", "value": "four"},
    {"from": "human", "value": "no reply"},
]


@pytest.mark.parametrize("form", ["array", "lines"])
def test_sharegpt_becomes_the_users_turns(tmp_path: Path, form: str) -> None:
    entries = [{"id": "1", "conversations": TALK}, {"conversations": TALK[1:]}, {"conversations": []}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(entries, indent=1) if form == "array" else "\n".join(map(json.dumps, entries)))
    dataset = read_sharegpt(path, max_turns=4, think_s=1.5, default_output_tokens=None)
    (conversation,) = dataset.conversations
    assert [turn["messages"] for turn in conversation.turns] == [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "More"}],
    ]
    assert [turn["max_tokens"] for turn in conversation.turns] == [4, 1]
    assert conversation.think_s == 1.5
    short = read_sharegpt(path, max_turns=1, think_s=0, default_output_tokens=9)
    assert [turn["max_tokens"] for turn in short.conversations[0].turns] == [9]


def test_a_malformed_conversation_names_the_line_it_begins_in(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"

    def complaint(text: str) -> str:
        path.write_text(text)
        with pytest.raises(BenchError) as caught:
            read_sharegpt(path, max_turns=4, think_s=0, default_output_tokens=None)
        return str(caught.value)

    good = json.dumps({"conversations": TALK}, indent=1)
    assert f"line {good.count(chr(10)) + 3}: conversations" in complaint(f"[\n{good},\n" + '{"conversations": 5}\n]')
    assert "line 2: conversations.0.from" in complaint('[\n{"conversations": [{"value": "x"}]}]')
    assert "line 3" in complaint('[\n{"conversations": [\n}]')
    assert "not closed" in complaint(f"[{good}")
    assert "line 2 is not JSON" in complaint(json.dumps({"conversations": TALK}) + "\n{")
    assert "no conversation" in complaint("[]")
