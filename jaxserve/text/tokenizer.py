"""Text to token ids and back; knows neither chat messages nor requests.

A token is a fixed string of bytes whatever stands around it, so a text is the join of its tokens' bytes, read as UTF-8.
That holds for byte-level BPE and for SentencePiece BPE with byte fallback, and decoders of other kinds are refused.
"""

import codecs
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.text.folder_tokenizer import read_folder_tokenizer, write_folder_tokenizer
from jaxserve.text.gguf_tokenizer import read_gguf_tokenizer
from jaxserve.text.token_spec import TokenizerSpec, blamed_on, byte_alphabet
from models.errors import CheckpointError, UnsupportedModelError

REPLACEMENT = "\ufffd"
MAX_VOCAB_SIZE = 2**22  # sixteen times the largest that is known; a file with a higher id would cost memory for each
REPLACE_EACH_BYTE = "jaxserve.replace_each_byte"
_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """SentencePiece's rule for broken UTF-8: one U+FFFD a byte, where Python's own is one a broken character."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


class Tokenizer:
    """One checkpoint's tokenizer. Immutable, and safe to use from several threads.

    Attributes:
      vocab_size: the highest token id plus one; the model's embedding may have more rows.
      max_token_bytes: of the longest token: a text has at least its bytes by this many tokens.
      bos_token_id: None where the checkpoint names no such token.
      eos_token_ids: every id that ends an output, by the tokenizer or the generation configuration.
      special_token_ids: ids that `decode` leaves out unless asked for.
      special_token_texts: what they spell.
      special_tokens: role → text, as chat templates see them; unset roles are absent.
      chat_templates: name → jinja source; the plain one is called "default".
      add_bos: `encode` begins with `bos_token_id`.
      utf8_errors: how broken UTF-8 is read, as a codec error handler: byte-level BPE puts one U+FFFD for each broken
        character, SentencePiece one for each byte.
      strips_leading_space: the first space of a text is the one that `encode` put there.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        """Raises UnsupportedModelError if the tokens' text would depend on their neighbours."""
        self._spec = spec
        self._backend = spec.backend
        byte_level, self.strips_leading_space = _decoder_kind(spec)
        self.utf8_errors = "replace" if byte_level else REPLACE_EACH_BYTE
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise UnsupportedModelError(
                f"token id {self.vocab_size - 1} is beyond the highest supported, {MAX_VOCAB_SIZE - 1}"
            )
        self._pieces = [b""] * self.vocab_size
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        alphabet = byte_alphabet()
        for token, token_id in vocab.items():
            if not byte_level:
                self._pieces[token_id] = _sentencepiece_bytes(token)
            elif token in added:
                self._pieces[token_id] = token.encode()
            else:
                self._pieces[token_id] = _byte_level_bytes(token, alphabet)
        self.max_token_bytes = max(map(len, self._pieces), default=0)
        self.special_tokens = dict(spec.special_tokens)
        self.chat_templates = dict(spec.chat_templates)
        self.eos_token_ids = spec.eos_token_ids
        bos = spec.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else self._backend.token_to_id(bos)
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self.special_token_texts = frozenset(
            token.content for token in self._backend.get_added_tokens_decoder().values() if token.special
        )
        self.add_bos = self.bos_token_id is not None and self._backend.encode("a").ids[:1] == [self.bos_token_id]

    @property
    def spec(self) -> TokenizerSpec:
        return self._spec

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become themselves.

        A byte for which the vocabulary has no token vanishes, as in the reference (SmolLM2 lacks 21 of them).

        Args:
          add_special_tokens: with the begin (and rarely end) tokens that the checkpoint adds to a prompt.

        Raises:
          InvalidRequestError: the text holds a lone surrogate, which no encoding can carry.
        """
        _refuse_surrogates(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts, on several cores."""
        for text in texts:
            _refuse_surrogates(text)
        return [encoding.ids for encoding in self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)]

    def encode_chat(self, text: str, *, literal_at: Collection[int] = ()) -> list[int]:
        """Token ids of a rendered chat template, with one BOS at most.

        BOS is added where the checkpoint adds it to a prompt, unless the template already wrote it. No end token is.

        Args:
          literal_at: characters at which a special token's text is only text.
        """
        if literal_at:
            ids = self._encode_with_literals(text, literal_at)
        else:
            ids = self.encode(text, add_special_tokens=False)
        if self.add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def _encode_with_literals(self, text: str, literal_at: Collection[int]) -> list[int]:
        _refuse_surrogates(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        places = sorted(literal_at)
        written: dict[str, list[int]] = {}
        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # Some special tokens take the spaces around them, so they may begin before their own text.
            next_place = bisect_left(places, start)
            if token_id not in self.special_token_ids or next_place == len(places) or places[next_place] >= end:
                ids.append(token_id)
                continue
            spelled = text[start:end]
            if spelled not in written:
                written[spelled] = self._encode_literal(spelled)
            ids += written[spelled]
        return ids

    def _encode_literal(self, text: str) -> list[int]:
        """Token ids of a special token's text, none of them special: its halves, cut where neither is one again."""
        for cut in range(1, len(text)):
            ids = self._encode_inside(text[:cut]) + self._encode_inside(text[cut:])
            if self.special_token_ids.isdisjoint(ids):
                return ids
        return []  # one character, or nothing but special tokens however it is cut: there is no other way to write it

    def _encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that stands inside a line: a SentencePiece tokenizer puts no space before it."""
        before, ids = self.encode("\n", add_special_tokens=False), self.encode("\n" + text, add_special_tokens=False)
        if ids[: len(before)] == before:
            return ids[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole token sequence; ids beyond the vocabulary have none."""
        text = self.join_bytes(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", self.utf8_errors)
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special tokens included; none for an id without a token."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token's bytes as text, for display: a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", self.utf8_errors)

    def join_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of a token sequence, before they are read as UTF-8."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint: a folder (Hugging Face, Orbax) or a `.gguf` file.

    Raises:
      CheckpointError, UnsupportedModelError: see `read_folder_tokenizer` and `read_gguf_tokenizer`.
    """
    if path.is_dir():
        spec = read_folder_tokenizer(path)
    elif path.suffix == ".gguf":
        spec = read_gguf_tokenizer(path)
    else:
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
    try:
        with blamed_on(path):
            return Tokenizer(spec)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer, whatever it was read from, as the Hugging Face files that `load_tokenizer` reads back."""
    folder.mkdir(parents=True, exist_ok=True)
    write_folder_tokenizer(tokenizer.spec, folder)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds a lone surrogate, U+{ord(text[error.start]):04X} at character {error.start}; "
            "it cannot be encoded",
            param="prompt",
        ) from error


def _decoder_kind(spec: TokenizerSpec) -> tuple[bool, bool]:
    """Whether tokens are byte-level (else SentencePiece), and whether the text's first space is dropped."""
    decoder = spec.backend.decoder
    state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    strip = steps[-1] if kinds[-1:] == ["Strip"] else None
    if (
        kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
        and len(kinds) == 3 + (strip is not None)
        and ((replace := steps[0])["pattern"], replace["content"]) == ({"String": "▁"}, " ")
        and (strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0))
    ):
        return False, strip is not None
    raise UnsupportedModelError(
        f"the tokenizer's decoder {'+'.join(str(kind) for kind in kinds)} is not supported; ByteLevel and "
        "SentencePiece's Replace+ByteFallback+Fuse(+Strip) are"
    )


def _byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes(alphabet[char] for char in token)
    except KeyError:  # not written in the byte alphabet: literal text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    fallback = _FALLBACK_BYTE.fullmatch(token)
    return bytes.fromhex(fallback[1]) if fallback else token.replace("▁", " ").encode()
