"""Varying settings: what is tried, what is kept."""

import pytest

from jaxserve.errors import ConfigError
from server.planning.search import Knee
from server.planning.sweep import Candidate, Variation, best, parse_variation, sweep
from server.planning.trial import Trial

KNEES = {
    (): 2.0,
    ("a=1",): 1.5,
    ("a=2",): 2.6,
    ("a=2", "b=x"): 2.65,
    ("a=2", "b=y"): 3.0,
}


ALONE = Trial(rate=0.0, requests=1, failure_share=0.0, output_tokens_per_s=1.0, outcomes=())


def knee(rate: float) -> Knee:
    return Knee(rate=rate, capacity=4.0, trials=(), alone=ALONE)


def test_each_setting_is_varied_on_top_of_the_best_so_far() -> None:
    variations = [Variation(key="a", values=("1", "2")), Variation(key="b", values=("x", "y"))]
    tried = list(sweep(variations, lambda assignments: knee(KNEES[assignments])))
    assert [candidate.assignments for candidate in tried] == list(KNEES)
    assert best(tried).assignments == ("a=2", "b=y")


def test_a_change_within_the_searchs_own_uncertainty_is_not_recommended() -> None:
    candidates = [Candidate(assignments=(), knee=knee(2.0)), Candidate(assignments=("a=2",), knee=knee(2.08))]
    assert best(candidates).assignments == ()


def test_a_variation_is_a_key_and_values() -> None:
    assert parse_variation("scheduler.policy=fcfs, fair") == Variation(key="scheduler.policy", values=("fcfs", "fair"))


@pytest.mark.parametrize("text", ["scheduler.policy", "=1,2", "a.b=", "a.b= , "])
def test_what_is_no_variation_is_told_so(text: str) -> None:
    with pytest.raises(ConfigError, match="--vary"):
        parse_variation(text)
