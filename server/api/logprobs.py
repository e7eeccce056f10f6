"""Writes log-probabilities in the two shapes OpenAI has for them, and vLLM's for prompts; owns nothing."""

from collections.abc import Sequence
from typing import TypedDict

from jaxserve.request import TokenLogprobs
from jaxserve.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


class CompletionLogprobs(TypedDict):
    """Four parallel lists, one entry per token; entry 0 of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    logprob: float
    decoded_token: str


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; for a part of a character `bytes:` and its bytes, so that different tokens stay different."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    text_offsets: Sequence[int],
    width: int,
) -> CompletionLogprobs:
    """The `width` likeliest of each token; the chosen one stands among them whether or not it is one of these."""
    return CompletionLogprobs(
        tokens=[token_label(tokenizer, token_id) for token_id in token_ids],
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in logprobs],
        top_logprobs=[None if entry is None else _alternatives(tokenizer, entry, width) for entry in logprobs],
        text_offset=list(text_offsets),
    )


def extend_logprobs(logprobs: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Adds those of the part of a text that comes next: in place, since an output may have 100,000 parts."""
    logprobs["tokens"] += more["tokens"]
    logprobs["token_logprobs"] += more["token_logprobs"]
    logprobs["top_logprobs"] += more["top_logprobs"]
    logprobs["text_offset"] += more["text_offset"]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    content = [
        TokenLogprob(
            **_chat_entry(tokenizer, entry.token_id, entry.logprob),
            top_logprobs=[_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
        )
        for entry in logprobs
    ]
    return ChatLogprobs(content=content, refusal=None)


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None], width: int
) -> list[dict[str, PromptLogprob] | None]:
    """One mapping a token, from id to logprob: the prompt's own token and the `width` likeliest. Entry 0 is null."""
    return [
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(logprob=_finite(logprob), decoded_token=token_label(tokenizer, token_id))
            for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top[:width])
        }
        for entry in logprobs
    ]


def _alternatives(tokenizer: Tokenizer, entry: TokenLogprobs, width: int) -> dict[str, float]:
    by_label: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:width], (entry.token_id, entry.logprob)):
        # Two ids can spell the same text; the likelier one came first.
        by_label.setdefault(token_label(tokenizer, token_id), _finite(logprob))
    return by_label


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(
        token=token_label(tokenizer, token_id),
        bytes=list(tokenizer.token_bytes(token_id)),
        logprob=_finite(logprob),
    )


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
