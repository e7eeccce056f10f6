"""Traces: their file, and synthetic arrivals."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.simulation.traces import TracedRequest, arrival_times, read_trace, synthetic_trace, write_trace


def test_what_was_written_is_read_back_in_the_order_of_arrival(tmp_path: Path) -> None:
    early = TracedRequest(arrival_s=0.5, prompt_tokens=3, output_tokens=2)
    late = TracedRequest(arrival_s=2.0, prompt_token_ids=(1, 2, 3), output_token_ids=(4,))
    path = tmp_path / "trace.jsonl"
    write_trace(path, [late, early])
    assert read_trace(path) == [early, late]
    assert (late.prompt_length, late.output_length, early.prompt_length, early.output_length) == (3, 1, 3, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Invalid JSON"),
        ('{"arrival_s": 1, "prompt_tokens": 3}', "line 2: give either output_tokens or output_token_ids"),
        ('{"arrival_s": 1, "output_tokens": 3}', "line 2: give either prompt_tokens or prompt_token_ids"),
        (
            '{"arrival_s": 1, "prompt_tokens": 3, "prompt_token_ids": [1], "output_tokens": 3}',
            "line 2: give either prompt_tokens or",
        ),
        (
            '{"arrival_s": -1, "prompt_tokens": 3, "output_tokens": 3}',
            "line 2: arrival_s: .*greater than or equal to 0",
        ),
        ('{"arrival_s": 1, "prompt_token_ids": [], "output_tokens": 3}', "line 2: prompt_token_ids: .*at least 1"),
        ('{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 3, "rate": 1}', "line 2: rate: Extra inputs"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 3}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_missing_or_empty_trace_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.5), ("constant", 0.0)])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(process: str, cv: float) -> None:
    gaps = np.diff([0.0, *arrival_times(process, 4.0, 100_000, seed=1, cv=cv)])  # type: ignore[arg-type]
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_a_synthetic_trace_follows_from_its_seed_alone() -> None:
    def trace(seed: int) -> list[TracedRequest]:
        return synthetic_trace(arrival_times("poisson", 2.0, 50, seed=seed), (3, 5), (1, 2), seed=seed)

    assert trace(1) == trace(1) != trace(2)
    assert {request.prompt_length for request in trace(1)} == {3, 4, 5}
    assert {request.output_length for request in trace(1)} == {1, 2}
