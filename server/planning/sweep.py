"""Varies one setting at a time and keeps what moves the knee for sure; knows nothing of how a knee is found."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.errors import ConfigError
from server.planning.search import Knee

# A setting has to move the knee by more than the search's own uncertainty to be worth a change.
WORTH = 1.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """The values to try of one setting, `scheduler.max_num_batched_tokens=256,512`."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that was tried.

    Attributes:
      assignments: `a.b=c`, on top of the configuration that the sweep began with; none for that itself.
    """

    assignments: tuple[str, ...]
    knee: Knee

    @property
    def name(self) -> str:
        return ", ".join(self.assignments) or "as configured"


def parse_variation(text: str) -> Variation:
    """Raises ConfigError."""
    key, equals, values = text.partition("=")
    parts = tuple(value.strip() for value in values.split(",") if value.strip())
    if not equals or not key.strip() or not parts:
        raise ConfigError(f"--vary {text}: write a key and its values, scheduler.max_num_batched_tokens=256,512")
    return Variation(key=key.strip(), values=parts)


def sweep(variations: Sequence[Variation], knee_of: Callable[[tuple[str, ...]], Knee]) -> Iterator[Candidate]:
    """Tries the configuration as it is, then each setting's values, the best of the settings before kept.

    Yields:
      every candidate once it is known; `best` chooses among them.
    """
    kept = Candidate(assignments=(), knee=knee_of(()))
    yield kept
    for variation in variations:
        tried = [kept]
        for value in variation.values:
            assignments = (*kept.assignments, f"{variation.key}={value}")
            candidate = Candidate(assignments=assignments, knee=knee_of(assignments))
            yield candidate
            tried.append(candidate)
        kept = best(tried)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the highest knee, or the first, with the fewest changes, where none is surely better."""
    top = max(candidates, key=lambda candidate: candidate.knee.rate)
    return top if top.knee.rate > candidates[0].knee.rate * WORTH else candidates[0]
