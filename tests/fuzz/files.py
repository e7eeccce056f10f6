"""Fuzzes model files: a spoiled one is loaded, or refused by an error that names it, in bounded time and memory."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.errors import ModelError
from tests.fuzz.mutate import Draw, edited_bytes, edited_json, json_bytes
from tests.fuzz.seeds import Sample, gguf_bytes, gguf_header, load_whole, safetensors_bytes, safetensors_header, samples
from tests.fuzz.target import Target

MEMORY_BYTES = 2**30  # that one case may take on top of what the process has
TIME_S = 10.0
TEXT = "the cat 🙂 <s> \n"
# Keys that a reader asks for and the samples do not have.
CONFIG_NAMES = (
    *("sliding_window", "rope_parameters", "rope_theta", "partial_rotary_factor", "quantization_config", "layer_types"),
    *("attention_bias", "mlp_bias", "mscale", "mscale_all_dim", "attention_factor", "truncate", "low_freq_factor"),
)
TOKENIZER_NAMES = (
    *("added_tokens_decoder", "extra_special_tokens", "chat_template", "eos_token", "unk_token", "eos_token_id"),
    *("truncation", "padding", "normalizer", "lstrip", "special", "content"),
)
GGUF_NAMES = (
    *("general.alignment", "split.count", "llama.expert_count", "llama.attention.sliding_window", "llama.vocab_size"),
    *("llama.rope.scaling.yarn_ext_factor", "llama.rope.dimension_count", "tokenizer.ggml.eot_token_id"),
    *("tokenizer.ggml.pre", "tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix", "rope_freqs.weight"),
)


@st.composite
def spoiled(draw: Draw, made: tuple[Sample, ...]) -> tuple[Sample, dict[str, bytes | None]]:
    """A sample, and one or two of its files spoiled; rarely one is missing."""
    sample = draw(st.sampled_from(made))
    files: dict[str, bytes | None] = {}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(sample.files)))
        files[name] = None if draw(st.integers(0, 49)) == 0 else draw(_spoiled_file(sample, name))
    return sample, files


def _spoiled_file(sample: Sample, name: str) -> st.SearchStrategy[bytes]:
    content = sample.files[name]
    if name.endswith(".gguf"):
        header = gguf_header("llama" if "sentencepiece" in sample.name else "gpt2")
        described = edited_json(header, names=GGUF_NAMES).map(_gguf_or_none).filter(lambda file: file is not None)
        return described | edited_bytes(content, head=2500)
    if name.endswith(".safetensors"):
        return edited_json(safetensors_header(content)).map(safetensors_bytes) | edited_bytes(content, head=1500)
    if name.endswith(".json") or "_METADATA" in name or name.endswith("_sharding"):
        names = TOKENIZER_NAMES if "token" in name else CONFIG_NAMES
        return json_bytes(json.loads(content), names=names)
    if name.endswith(".jinja"):
        return edited_bytes(content)
    return edited_bytes(content)


def _gguf_or_none(described: Any) -> bytes | None:
    try:
        return gguf_bytes(described)
    except Exception:  # no GGUF file can say that
        return None


@contextmanager
def file_target(folder: Path) -> Iterator[Target]:
    """`folder`: scratch space."""
    made = samples(folder / "sound")
    place = folder / "spoiled"

    def check(case: tuple[Sample, dict[str, bytes | None]]) -> list[str]:
        sample, files = case
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        path = sample.with_files(files).write(place)
        return [f"{_weights(path)}, {_tokenizer(path)}"]

    with bounded_memory():
        yield Target(name="files", cases=spoiled(made), check=check)


def _weights(path: Path) -> str:
    try:
        load_whole(path)
    except ModelError as error:
        check_message(error, path)
        return "weights refused"
    return "weights loaded"


def _tokenizer(path: Path) -> str:
    try:
        tokenizer = load_tokenizer(path)
    except ModelError as error:
        check_message(error, path)
        return "tokenizer refused"
    use_tokenizer(tokenizer)
    return "tokenizer loaded"


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """What a server does with one: text there and back, a chat."""
    ids = tokenizer.encode(TEXT)
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids), ids
    tokenizer.decode(ids)
    for source in tokenizer.chat_templates.values():
        try:
            template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
            tokenizer.encode_chat(template.render([{"role": "user", "content": TEXT}]))
        except InvalidRequestError as error:
            error.message.encode()


def check_message(error: ModelError, path: Path) -> None:
    message = str(error)
    message.encode()  # a log and a terminal can show it
    assert str(path) in message, f"names no file of {path}: {message}"
    assert len(message) < 2000 + len(str(path)), f"{len(message)} characters: {message[:300]}"


@contextmanager
def bounded_memory() -> Iterator[None]:
    """An allocation beyond `MEMORY_BYTES` fails inside."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
