"""A server whose scheduler, pages and cache are real and whose device only takes its time: to be watched in tests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fake_engine import FAKE_MODEL
from live_server import LiveServer, serving

from jaxserve.engine import Engine
from jaxserve.scheduling.plan import Request
from jaxserve.simulation.null_runner import NullRunner
from jaxserve.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServeConfig
from server.engine.async_engine import AsyncEngine

SPOKEN = (
    "Once upon a time there was a page that nobody held. It waited in its tree until somebody began a story in the "
    "very same words, and was read again as if it had never been away. "
)
MAX_MODEL_LEN = 512


def watched_config(*, num_pages: int, max_num_seqs: int, server: Mapping[str, Any]) -> ServeConfig:
    return ServeConfig.model_validate(
        {
            "model": {"name": "watched", "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
            "cache": {"num_pages": num_pages, "page_size": 16, "dtype": "float32"},
            "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + 64},
            "execution": {
                "block_q": 32,
                "decode_buckets": [max_num_seqs],
                "prefill_buckets": [2],
                "compilation_cache": None,
            },
            "server": server,
        }
    )


def make_engine(config: ServeConfig, tokenizer: Tokenizer, step_s: float) -> Engine:
    spoken = tokenizer.encode(SPOKEN)

    def choose(request: Request, position: int) -> int:
        return spoken[(position - request.prompt_len) % len(spoken)]

    runner = NullRunner(choose=choose, block_q=32, step_seconds=lambda plan: step_s * (1 + len(plan.chunks)))
    return Engine(
        config,
        FAKE_MODEL,
        runner,  # type: ignore[arg-type]
        num_token_ids=tokenizer.vocab_size,
        eos_token_ids=frozenset(),
    )


@contextmanager
def watched_server(
    tokenizer: Tokenizer,
    *,
    num_pages: int = 129,
    max_num_seqs: int = 8,
    step_s: float = 0.02,
    server: Mapping[str, Any] | None = None,
) -> Iterator[LiveServer]:
    config = watched_config(num_pages=num_pages, max_num_seqs=max_num_seqs, server=server or {})
    with serving(
        lambda engine: create_app(engine, tokenizer, config.server),
        lambda: AsyncEngine(lambda _: make_engine(config, tokenizer, step_s)),
        settings=config.server,
    ) as live:
        live.wait_until_ready()
        yield live
