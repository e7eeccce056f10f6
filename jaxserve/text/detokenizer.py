"""Turns a growing token sequence into a growing text; owns the bytes of an unfinished character, no more."""

import codecs
from collections.abc import Iterable, Sequence

from jaxserve.text.tokenizer import Tokenizer

MAX_UNFINISHED = 3  # bytes: a UTF-8 character has at most 4


class Detokenizer:
    """Streams the text of one output, each piece as soon as no later token can change it.

    The deltas of `push` and `finish`, joined, are what the output adds to the prompt's text:
    `decode(prompt + output)` without its prefix `decode(prompt)`, both by `Tokenizer.decode`. With an empty prompt that
    is `decode(output)`. Where the prompt ends inside a character and the output completes it, the whole character is
    the output's; where the output does not, the U+FFFD of the broken character is the prompt's.

    So after a SentencePiece prompt the first word keeps its leading space (`" Paris"`), which continues a prompt
    correctly; give no prompt where the output stands alone (a chat reply), and that one space is dropped.

    How the tokens are cut into pushes does not change the joined text. At most 3 bytes are ever held back, and a push
    costs time in proportion to its own tokens' bytes, broken UTF-8 included.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.utf8_errors)
        tail = self._last_bytes(prompt_token_ids)
        self._drops_space = tokenizer.strips_leading_space and not tail
        # A lead byte among the last three starts a character whatever came before it.
        self._utf8.decode(tail)
        self._unfinished: bytes = self._utf8.getstate()[0]
        self._unfinished_shown = len(self._unfinished.decode("utf-8", tokenizer.utf8_errors))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens settle; may be empty."""
        raw = self._tokenizer.join_bytes(token_ids, skip_special_tokens=self._skip_special_tokens)
        return self._settle(raw, self._utf8.decode(raw))

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was never completed. Call once, last."""
        return self._settle(b"", self._utf8.decode(b"", final=True))

    def _settle(self, raw: bytes, text: str) -> str:
        if self._unfinished:
            self._unfinished += raw
            if not text:
                return ""
            if not _begins_with_character(self._unfinished):
                text = text[self._unfinished_shown :]
            self._unfinished = b""
        if self._drops_space and text:
            text = text.removeprefix(" ")
            self._drops_space = False
        return text

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._tokenizer.join_bytes((token_id,), skip_special_tokens=self._skip_special_tokens) + tail
            if len(tail) >= MAX_UNFINISHED:
                break
        return tail[-MAX_UNFINISHED:]


def _begins_with_character(raw: bytes) -> bool:
    """Whether the first UTF-8 character is whole, judged by the length its lead byte promises."""
    length = 4 if raw[0] >= 0xF0 else 3 if raw[0] >= 0xE0 else 2
    try:
        raw[:length].decode()
    except UnicodeDecodeError:
        return False
    return True
