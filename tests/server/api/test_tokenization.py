"""/tokenize, /detokenize and the render routes: what they say is what the engine would get."""

from typing import Any

import pytest
from live_server import LiveServer

from jaxserve.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Grüße 🎉"}]


def good(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("text", ["", "Grüße 🎉", "two  spaces ", "<|im_start|>user"])
def test_detokenize_undoes_tokenize(server: LiveServer, tokenizer: Tokenizer, text: str) -> None:
    answer = good(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 128
    assert good(server, "/detokenize", {"model": "tiny", "tokens": answer["tokens"]}) == {"prompt": text}


def test_special_tokens_vanish_from_a_text_only_when_asked_to(server: LiveServer) -> None:
    tokens = good(server, "/tokenize", {"prompt": "<|im_start|>hi"})["tokens"]
    assert good(server, "/detokenize", {"tokens": tokens, "skip_special_tokens": True}) == {"prompt": "hi"}


def test_a_conversation_is_tokenized_as_the_chat_route_does_it(server: LiveServer) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    used = good(server, "/v1/chat/completions", asked)["prompt_token_ids"]
    assert good(server, "/tokenize", {"messages": MESSAGES})["tokens"] == used
    rendered = good(server, "/v1/chat/completions/render", asked)
    assert rendered["prompt_token_ids"] == used
    assert rendered["prompt"].endswith("<|im_start|>user\nGrüße 🎉<|im_end|>\n<|im_start|>assistant\n")


def test_a_completions_prompts_are_rendered_in_order(server: LiveServer, tokenizer: Tokenizer) -> None:
    rendered = good(server, "/v1/completions/render", {"model": "tiny", "prompt": ["one", "two words"]})
    assert [entry["prompt"] for entry in rendered["data"]] == ["one", "two words"]
    assert [entry["prompt_token_ids"] for entry in rendered["data"]] == [
        tokenizer.encode(t) for t in ("one", "two words")
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 90_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1], "add_special_tokens": True}, "add_special_tokens"),
        ("/v1/completions/render", {"model": "tiny", "prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions/render", {"model": "tiny", "prompt": "a" * 90_000}, "prompt"),
        ("/v1/chat/completions/render", {"model": "tiny", "messages": MESSAGES, "top_p": 2}, "top_p"),
        ("/abort", {}, "request_id"),
        ("/abort", {"request_id": ""}, "request_id"),
    ],
)
def test_wrong_fields_are_named(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_another_models_text_is_not_tokenized(server: LiveServer) -> None:
    assert server.post("/tokenize", {"model": "other", "prompt": "a"}).status_code == 404
