"""The request mixes that benchmarks run; only numpy, so that a peer's environment can import it too."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Work:
    """One request: its prompt, and the number of tokens to generate, end-of-sequence ignored."""

    prompt_token_ids: list[int]
    output_tokens: int


def one_stream(output_tokens: int) -> list[Work]:
    """A lone user: one prompt of 128 random tokens."""
    return [Work(np.random.default_rng(1).integers(100, 49000, 128).tolist(), output_tokens)]


def w1(num_requests: int = 64, seed: int = 0, vocab_size: int = 49000) -> list[Work]:
    """W1: prompts of 64 to 256 random tokens, outputs of 8 to 256, log-normal, so that a batch mixes short and long.

    With the defaults: 10,361 prompt tokens and 6,147 output tokens.
    """
    rng = np.random.default_rng(seed)
    prompt_lengths = rng.integers(64, 257, num_requests)
    output_lengths = np.clip(np.exp(rng.normal(4.0, 0.9, num_requests)).astype(int), 8, 256)
    return [
        Work(rng.integers(100, vocab_size, int(prompt)).tolist(), int(output))
        for prompt, output in zip(prompt_lengths, output_lengths, strict=True)
    ]
