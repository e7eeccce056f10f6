"""The metadata of a tiny byte-level tokenizer, as a GGUF would have it."""

from typing import Any

from jaxserve.text.token_spec import byte_alphabet

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
