"""What a conformance case is, and how one fails; knows no HTTP."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.conformance.client import Server


class FailedError(Exception):
    """The server broke the claim; the message says what it did."""


class SkippedError(Exception):
    """The server lacks what the case is about and may lack it; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One claim about a server.

    Attributes:
      kind: the group it is told under.
      claim: a sentence that holds if `run` returns.
    """

    kind: str
    claim: str
    run: "Callable[[Server], Awaitable[None]]"


def expect(holds: bool, otherwise: str) -> None:
    """Raises FailedError, saying what happened instead, unless it holds."""
    if not holds:
        raise FailedError(otherwise)
