"""Builds a tokenizer from a GGUF file's metadata; knows neither tensors nor Hugging Face folders.

GGUF stores the vocabulary, its merges or scores and the *name* of the pre-tokenizer; the regexes behind a name are
llama.cpp's convention. Two kinds are supported: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.text.token_spec import TokenizerSpec, add_special_around, blamed_on
from models.checkpoint.gguf_file import read_gguf
from models.errors import CheckpointError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # llama.cpp's token types
ROLE_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_KEYS = ("eos", "eot", "eom")  # end of sequence, of turn, of message: each ends an output
SPACE = "▁"  # SentencePiece's visible space, U+2581

# Each pre-tokenizer cuts the text by its regexes in turn; matches and the gaps between them become the pieces.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_AFTER_WORD = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED_WORD % ("", "") + r"|\p{N}" + _AFTER_WORD
_GPT4O = _CASED_WORD % (("(?i:'s|'t|'re|'ve|'m|'ll|'d)?",) * 2) + r"|\p{N}{1,3}" + _AFTER_WORD
# DeepSeek-LLM lists its letters one range after another: the cased ones of Unicode 14, without these.
_UNLISTED = (
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U0001dfff"
)
_LISTED_WORD = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]+"
_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "mellum", "granite-docling"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (r"[\r\n]", _LISTED_WORD, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3),
}
# These families look a whole piece up before merging it, and begin a prompt with BOS unless the file says otherwise.
WHOLE_PIECE_FIRST = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"))
NORMALIZED_TO_NFC = frozenset(("qwen2", "deepseek-r1-qwen", "megrez"))  # as Qwen2's own tokenizer.json


def read_gguf_tokenizer(path: Path) -> TokenizerSpec:
    """The tokenizer in a GGUF file's metadata.

    Raises:
      CheckpointError: the file is damaged, or has no or an inconsistent vocabulary.
      UnsupportedModelError: a tokenizer model or pre-tokenizer that is not known here, named.
    """
    return build_gguf_tokenizer(path, read_gguf(path).metadata)


def build_gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> TokenizerSpec:
    """As `read_gguf_tokenizer`, from metadata already in memory; `path` is for messages only."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _array(path, metadata, "tokens", str)
    kinds = _array(path, metadata, "token_type", int, default=[NORMAL] * len(tokens))
    if not tokens:
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing or empty")
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if vocab.setdefault(token, token_id) != token_id:
            raise CheckpointError(f"{path}: tokens {vocab[token]} and {token_id} are both {token!r}")
    roles = {role: _token_id(path, metadata, key, len(tokens)) for role, key in ROLE_KEYS.items()}
    ends = [_token_id(path, metadata, key, len(tokens)) for key in END_KEYS]
    marked = [token_id for token_id, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    special = {tokens[token_id] for token_id in (roles["bos_token"], *ends, *marked) if token_id is not None}
    # Padding is often token 0, an ordinary one: it must not vanish from texts for that.
    special_tokens = {role: tokens[i] for role, i in roles.items() if i is not None and tokens[i] in special}
    with blamed_on(path):
        if model == "gpt2":
            backend, adds_bos = _byte_level(path, metadata, vocab)
        elif model == "llama":
            backend, adds_bos = _sentencepiece(path, metadata, vocab, kinds), True
        else:
            raise UnsupportedModelError(f"{path}: tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)")
        backend.add_special_tokens([_added(token, special=True) for token in tokens if token in special])
        backend.add_tokens(
            [_added(token, special=False) for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
        )
        wants_bos = _flag(path, metadata, "add_bos_token", adds_bos)
        wants_eos = _flag(path, metadata, "add_eos_token", False)
        add_special_around(
            backend,
            bos_token=special_tokens.get("bos_token") if wants_bos else None,
            eos_token=special_tokens.get("eos_token") if wants_eos else None,
        )
    return TokenizerSpec(
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
        chat_templates=_chat_templates(path, metadata),
    )


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def _byte_level(path: Path, metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Backend, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(f"{path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known: {known}")
    merges = [
        # the split is at the first space after the first character: "Ġ a" and "  a" (a token that begins with a space)
        (merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :])
        for merge in _array(path, metadata, "merges", str)
    ]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in WHOLE_PIECE_FIRST))
    if name in NORMALIZED_TO_NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in PRE_TOKENIZERS[name]]
    to_bytes = pre_tokenizers.ByteLevel(
        add_prefix_space=_flag(path, metadata, "add_space_prefix", False), use_regex=False
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, name in WHOLE_PIECE_FIRST


def _sentencepiece(path: Path, metadata: Mapping[str, Any], vocab: dict[str, int], kinds: list[int]) -> Backend:
    scores = _array(path, metadata, "scores", float)
    if len(scores) != len(vocab):
        raise CheckpointError(f"{path}: tokenizer.ggml.scores has {len(scores)} entries for {len(vocab)} tokens")
    unknown = next((token for token, token_id in vocab.items() if kinds[token_id] == UNKNOWN), None)
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(vocab, kinds, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _flag(path, metadata, "add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_from_scores(vocab: Mapping[str, int], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that make rank-ordered BPE do what SentencePiece does with scores: join the best-scored pair first.

    Every way to write a token as two others is a merge; the better the whole's score, the earlier its rank.
    """
    mergeable = {token for token, token_id in vocab.items() if kinds[token_id] in (NORMAL, USER_DEFINED)}
    lengths = sorted(set(map(len, mergeable)))  # cuts elsewhere leave no token; a wild token may have a million
    ranked = []
    for whole in mergeable:
        for cut in itertools.takewhile(lambda cut: cut < len(whole), lengths):  # noqa: B023, used at once
            left, right = whole[:cut], whole[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[vocab[whole]], vocab[whole], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _chat_templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(prefix + "."):
            if not isinstance(value, str):
                raise CheckpointError(f"{path}: {key} is no text")
            found["default" if key == prefix else key.removeprefix(prefix + ".")] = value
    return found


def _array(
    path: Path, metadata: Mapping[str, Any], key: str, kind: type, *, default: list[Any] | None = None
) -> list[Any]:
    name = f"tokenizer.ggml.{key}"
    if name not in metadata and default is not None:
        return default
    value = metadata.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise CheckpointError(f"{path}: {name} is no array of {kind.__name__}")
    return value


def _flag(path: Path, metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} is {value!r}, not a boolean")
    return value


def _token_id(path: Path, metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    value = metadata.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(f"{path}: {name} is {value!r}; the vocabulary has ids 0 to {vocab_size - 1}")
    return value
