"""/v1/embeddings through the official client: equal to transformers', in both formats, beside other traffic."""

import base64
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from live_server import LiveServer, serving
from tiny_server import load_tiny, tiny_config

from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.engine.async_engine import AsyncEngine

GOLDEN = np.load(Path(__file__).with_name("golden_embeddings.npz"))
LENGTHS = sorted(int(name.partition("_")[2]) for name in GOLDEN if name.startswith("prompt_"))
PROMPTS = [GOLDEN[f"prompt_{length}"].tolist() for length in LENGTHS]


def embed(client: openai.OpenAI, texts: Any, **fields: Any) -> np.ndarray[Any, Any]:
    reply = client.embeddings.create(model="tiny", input=texts, **fields)
    assert [entry.index for entry in reply.data] == list(range(len(reply.data)))
    return np.array([entry.embedding for entry in reply.data])


def golden(pooling: str) -> np.ndarray[Any, Any]:
    return np.stack([GOLDEN[f"{pooling}_{length}"] for length in LENGTHS])


def test_embeddings_are_transformers_last_hidden_states(client: openai.OpenAI) -> None:
    embeddings = embed(client, PROMPTS)
    np.testing.assert_allclose(embeddings, golden("last"), atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1.0, atol=1e-6)


@pytest.mark.slow
def test_embeddings_are_transformers_means(tiny_model: Path, tokenizer: Tokenizer) -> None:
    config = tiny_config(tiny_model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"pooling": "mean"})})
    with serving(
        lambda engine: create_app(engine, tokenizer, config.server),
        lambda: AsyncEngine(partial(load_tiny, config, tokenizer)),
    ) as live:
        live.wait_until_ready()
        with live.openai() as client:
            np.testing.assert_allclose(embed(client, PROMPTS), golden("mean"), atol=2e-5)
            # Again: what the first ones left in the slots, and in the cache, changes nothing.
            np.testing.assert_allclose(embed(client, PROMPTS[::-1]), golden("mean")[::-1], atol=2e-5)


def test_neighbours_that_generate_change_nothing(server: LiveServer, client: openai.OpenAI) -> None:
    def generate() -> None:
        client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=100, n=4, extra_body={"ignore_eos": True})

    thread = threading.Thread(target=generate)
    thread.start()
    embeddings = embed(client, PROMPTS * 4)
    thread.join()
    np.testing.assert_allclose(embeddings, np.tile(golden("last"), (4, 1)), atol=2e-5)
    assert server.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}


def test_texts_and_both_formats_agree_and_usage_counts_prompts(server: LiveServer, tokenizer: Tokenizer) -> None:
    body = {"model": "tiny", "input": ["Grüße 🎉", "two"]}
    as_floats = server.post("/v1/embeddings", body).json()
    as_bytes = server.post("/v1/embeddings", {**body, "encoding_format": "base64", "dimensions": 32}).json()
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in as_bytes["data"]]
    np.testing.assert_allclose([entry["embedding"] for entry in as_floats["data"]], decoded, rtol=1e-6)
    num_tokens = sum(len(tokenizer.encode(text)) for text in body["input"])
    assert as_floats["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_embeddings_count_as_ended_requests_without_output(server: LiveServer, client: openai.OpenAI) -> None:
    def counts() -> list[float]:
        return [
            server.metric("request_success_total", finished_reason="stop"),
            server.metric("generation_tokens_total"),
        ]

    stopped, generated = counts()
    embed(client, PROMPTS)
    assert counts() == [stopped + len(PROMPTS), generated]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": ["a", ""]}),
        ("input", {"input": [7] * 128}),
        ("input", {"input": [10**6]}),
        ("dimensions", {"dimensions": 16}),
        ("dimensions", {"dimensions": 0}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("temperature", {"temperature": 0}),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_refused_by_name(server: LiveServer, param: str, fields: dict[str, Any]) -> None:
    reply = server.post("/v1/embeddings", {"model": "tiny", "input": "a", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
