"""Makes requests out of nothing: random texts, shared prefixes, conversations; knows a token's length by hearsay only.

There is no tokenizer here. Texts are common short words, and how many tokens a word makes is asked of the server once
(`probe.py`), so lengths are near what was wanted; the report shows what the server counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from server.bench.load import Conversation

Api = Literal["chat", "completions"]

# Mostly one token each, with the space before it, in any vocabulary of English.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education foot boy age policy music market sense nation plan college interest death course experience effect use
class control field development role effort rate heart drug show leader light voice wife police mind price report paper
space ground form support event official matter center couple site project base activity star table need court oil
situation cost industry figure street image phone data picture practice piece land product doctor wall news test movie
north love step type film tree source hair window baby rock culture chance brother energy period summer hotel road
""".split()  # noqa: SIM905


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Lengths in tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high, endpoint=True))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLength:
    """How words become tokens in one server: `fixed + per_word * words`. `fixed` is the chat template's."""

    per_word: float = 1.0
    fixed: float = 0.0

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is sent.

    Attributes:
      input_tokens: of a prompt's own part: of the first turn in a conversation, of what follows a shared prefix.
      prefix_tokens, num_prefixes: a prefix in front of each prompt, one of so many; 0: none.
      turns: of a conversation; each asks `turn_tokens` more.
    """

    input_tokens: Range
    output_tokens: Range
    api: Api = "chat"
    prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: int = 1
    turn_tokens: Range = Range(low=32, high=32)
    think_s: float = 0.0


def random_conversations(
    workload: Workload, length: TokenLength, *, seed: int, prefix_seed: int, length_seed: int | None = None
) -> Iterator[Conversation]:
    """Endless; the same seed gives the same texts.

    Args:
      seed: of texts: no two runs should share one, or the second finds its prompts cached.
      length_seed: of lengths, where runs are to be compared at the same ones; None: as `seed`.
      prefix_seed: of the shared prefixes, which runs may well share.
    """
    rng = np.random.default_rng([seed, 1])
    length_rng = np.random.default_rng(seed if length_seed is None else length_seed)
    prefix_rng = np.random.default_rng(prefix_seed)
    prefixes = [
        _text(length.words(workload.prefix_tokens), prefix_rng)
        for _ in range(workload.num_prefixes if workload.prefix_tokens else 0)
    ]
    while True:
        turns: list[dict[str, Any]] = []
        for number in range(workload.turns):
            wanted = (workload.turn_tokens if number else workload.input_tokens).draw(length_rng)
            # A prefix already holds the template's tokens.
            words = round(wanted / length.per_word) if prefixes else length.words(wanted)
            text = _text(max(1, words), rng)
            if prefixes and not number:
                text = f"{prefixes[int(rng.integers(len(prefixes)))]}\n\n{text}"
            turns.append({**_prompt(text, workload.api), "max_tokens": workload.output_tokens.draw(length_rng)})
        yield Conversation(turns=tuple(turns), think_s=workload.think_s)


def sized_conversation(input_tokens: int, output_tokens: int, length: TokenLength, api: Api, seed: int) -> Conversation:
    """One request of given lengths, for traces that have lengths alone."""
    text = _text(length.words(input_tokens), np.random.default_rng(seed))
    return Conversation(turns=({**_prompt(text, api), "max_tokens": output_tokens},))


def _prompt(text: str, api: Api) -> dict[str, Any]:
    said = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {**said, "temperature": 0}  # two servers write the same, as far as they can


def _text(num_words: int, rng: np.random.Generator) -> str:
    return " ".join(_WORDS[index] for index in rng.integers(len(_WORDS), size=num_words))
