"""The configuration of the tiny model's server, for tests that start one of their own."""

from pathlib import Path

from quick_compilation import quick_compilation

from jaxserve.engine import Engine
from jaxserve.startup.loading import load_engine
from jaxserve.text.tokenizer import Tokenizer
from server.config import ServeConfig
from server.engine.async_engine import Progress

MAX_MODEL_LEN = 128


def tiny_config(tiny_model: Path) -> ServeConfig:
    return ServeConfig.model_validate(
        {
            "model": {"path": str(tiny_model), "name": "tiny", "max_model_len": MAX_MODEL_LEN},
            "cache": {"num_pages": 65},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 8 + 64},
            "execution": {"decode_buckets": [8], "prefill_buckets": [2]},
            "server": {"max_body_bytes": 100_000},
        }
    )


def load_tiny(config: ServeConfig, tokenizer: Tokenizer, progress: Progress) -> Engine:
    with quick_compilation():
        return load_engine(config, tokenizer, progress=progress)
