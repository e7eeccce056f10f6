"""Real servers to speak to: one with a tiny random model, for nearly everything, and one with the embedded model."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import openai
import pytest
from live_server import LiveServer, serving
from tiny_server import load_tiny, tiny_config
from tiny_weights import write_tiny_weights

from jaxserve.startup.loading import load_engine
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from models.checkpoint import resolve_model
from server.app import create_app
from server.config import ServeConfig
from server.engine.async_engine import AsyncEngine


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random two-layer model with the embedded model's tokenizer; it speaks no language but every code path."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tokenizer(tokenizer, folder)
    write_tiny_weights(folder, tokenizer.vocab_size)
    return folder


@pytest.fixture(scope="session")
def server(tiny_model: Path, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """The tiny model, ready."""
    config = tiny_config(tiny_model)
    with serving(
        lambda engine: create_app(engine, tokenizer, config.server),
        lambda: AsyncEngine(partial(load_tiny, config, tokenizer)),
    ) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture(scope="session")
def embedded_server(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """The embedded model, ready."""
    config = ServeConfig.model_validate(
        {
            "model": {"max_model_len": 256},
            "cache": {"num_pages": 65},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 4 + 64},
            "execution": {"decode_buckets": [4], "prefill_buckets": [2]},
        }
    )
    with serving(
        lambda engine: create_app(engine, tokenizer, config.server),
        lambda: AsyncEngine(lambda progress: load_engine(config, tokenizer, progress=progress)),
    ) as live:
        live.wait_until_ready()
        yield live


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client
