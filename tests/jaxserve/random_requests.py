"""Random requests of mixed parameters for the tiny model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL

from jaxserve.request import SamplingParams

MAX_LEN = TINY_MODEL.max_position
# One token below, at, and above the edges of pages (8, 5), blocks (16, 7), prefill buckets and token budgets.
EDGES = (
    1,
    4,
    5,
    6,
    7,
    8,
    9,
    13,
    14,
    15,
    16,
    17,
    20,
    21,
    22,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    72,
    73,
    80,
    112,
    128,
    129,
    160,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomRequest:
    prompt: tuple[int, ...]
    params: SamplingParams


def random_request(rng: np.random.Generator, *, max_output: int = 32) -> RandomRequest:
    """A valid request; every parameter that the engine knows is used by a fair share of them."""
    length = int(rng.choice(EDGES)) if rng.random() < 0.6 else int(rng.integers(1, 161))
    few = [int(token) for token in rng.choice(NUM_TOKEN_IDS, 6, replace=False)]
    options: dict[str, Any] = {"seed": int(rng.integers(-(2**63), 2**63))}

    def sometimes(share: float, **more: Any) -> None:
        if rng.random() < share:
            options.update(more)

    options["temperature"] = float(rng.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5]))
    sometimes(0.3, top_k=int(rng.choice([1, 2, 10, 149, 150, 500])))
    sometimes(0.3, top_p=float(rng.uniform(0.2, 0.99)))
    sometimes(0.2, min_p=float(rng.uniform(0.01, 0.3)))
    sometimes(0.2, repetition_penalty=float(rng.uniform(0.8, 1.5)))
    sometimes(0.2, presence_penalty=float(rng.uniform(-2, 2)))
    sometimes(0.2, frequency_penalty=float(rng.uniform(-2, 2)))
    sometimes(0.2, logit_bias={few[0]: float(rng.uniform(-20, 20)), EOS: 4.0})
    sometimes(0.2, stop_token_ids=tuple(int(token) for token in rng.choice(NUM_TOKEN_IDS, 5)))
    sometimes(0.2, bad_word_ids=((few[0],), tuple(few[1:3]), (few[2], few[1], few[2])))
    sometimes(0.15, allowed_token_ids=tuple(few), stop_token_ids=(few[3],))
    sometimes(0.2, ignore_eos=True)
    sometimes(0.4, logprobs=int(rng.integers(0, 6)))
    sometimes(0.2, prompt_logprobs=int(rng.integers(0, 6)))
    max_tokens = int(rng.integers(1, max_output + 1))
    options["max_tokens"] = max_tokens
    sometimes(0.2, min_tokens=int(rng.integers(1, max_tokens + 1)))
    if rng.random() < 0.03:  # up to the end of the context
        length = int(rng.integers(MAX_LEN - max_output, MAX_LEN))
        options |= {"max_tokens": None, "min_tokens": 0}
    prompt = rng.choice(few if "bad_word_ids" in options else NUM_TOKEN_IDS, length)
    return RandomRequest(prompt=tuple(int(token) for token in prompt), params=SamplingParams(**options))
