"""What a fuzz target is, and the loop that feeds it: batches by hypothesis, each bounded, each fault kept once."""

import faulthandler
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

HANG_S = 120.0  # of one case, or of what follows a batch: then the process ends and shows where every thread is


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Attributes:
    cases: everything that one call of `check` needs, small enough to print.
    check: raises on a fault (any exception is one); returns what came of the case, in a word or two for each of its
      parts, for the table.
    settle: after each batch: raises unless nothing is left of it.
    """

    name: str
    cases: st.SearchStrategy[Any]
    check: Callable[[Any], Sequence[str]]
    settle: Callable[[], None] = lambda: None


@dataclass(kw_only=True, slots=True)
class Result:
    """What a target's cases came to."""

    cases: int = 0
    slowest_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)  # by where they were raised: the case and its traceback


def fuzz(target: Target, *, seconds: float, first_seed: int, batch: int, batches: int | None = None) -> Result:
    """Runs batches until the time is up, or so many of them.

    A batch ends at its first fault, which hypothesis makes small; the next one goes on from another seed.
    """
    result = Result()
    end = time.monotonic() + seconds
    number = first_seed
    while time.monotonic() < end and (batches is None or number < first_seed + batches):
        try:
            _run_batch(target, result, number, batch, end)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            target.settle()
        except Exception as error:
            _keep(result, number, error)
        finally:
            faulthandler.cancel_dump_traceback_later()
        number += 1
    return result


def _run_batch(target: Target, result: Result, number: int, batch: int, end: float) -> None:
    @seed(number)
    @settings(
        max_examples=batch,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(target.cases)
    def run(case: Any) -> None:
        start = time.monotonic()
        if start > end:
            return
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        outcomes = _checked(target, case)
        faulthandler.cancel_dump_traceback_later()
        result.cases += len(outcomes)
        result.outcomes.update(outcomes)
        result.slowest_s = max(result.slowest_s, time.monotonic() - start)

    run()


def _checked(target: Target, case: Any) -> Sequence[str]:
    try:
        return target.check(case)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise AssertionError(f"a panic: {error!r}") from error


def _keep(result: Result, number: int, error: BaseException) -> None:
    shown = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/fuzz/" not in frame.filename and "hypothesis" not in frame.filename]
    where = f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}" if ours else str(error)[:80]
    result.faults.setdefault(f"{type(error).__name__} at {where}", f"seed {number}\n{shown}")
