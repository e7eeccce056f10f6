"""Copies from host memory against computing again, by the step-time table."""

from jaxserve.scheduling.restore_rule import RestoreRule
from jaxserve.simulation.step_times import PageCopyTime, StepTime, StepTimes


def rule(page_copy: PageCopyTime | None, keys_s: float = 0.0) -> RestoreRule:
    """Four blocks of 16 tokens, eight pages of 8, take 80 ms, and each key that they read `keys_s` more."""
    steps = [
        StepTime(decode_rows=4, prefill_blocks=4, kv_tokens=keys, seconds=0.08 + keys * keys_s) for keys in (0, 1000)
    ]
    times = StepTimes(
        device="d", jax_version="j", model="m", config_digest="c", block_q=16, page_copy=page_copy, steps=tuple(steps)
    )
    return RestoreRule(times=times, page_size=8, block_q=16, max_prefill_blocks=4)


def test_pages_are_copied_where_that_is_faster_than_to_compute_them() -> None:
    for seconds, pays in [(0.009, True), (0.011, False)]:
        copies = PageCopyTime(save_seconds=1.0, restore_seconds=seconds)
        assert [rule(copies).pays(0, count) for count in (1, 100)] == [pays, pays]


def test_a_long_prefix_costs_more_to_compute_and_as_much_to_copy() -> None:
    copies = PageCopyTime(save_seconds=1.0, restore_seconds=0.02)
    assert not rule(copies, keys_s=1e-4).pays(0, 4)
    assert rule(copies, keys_s=1e-4).pays(100, 4)


def test_without_copy_times_everything_is_copied() -> None:
    assert rule(None).pays(0, 1)
    assert RestoreRule(times=None, page_size=8, block_q=16, max_prefill_blocks=4).pays(0, 1)


def test_a_step_moves_no_more_than_it_could_have_computed_and_than_is_copied_without_waiting() -> None:
    for seconds, most in [(0.01, 8), (1.0, 1), (0.0, 128), (1e-6, 128)]:
        assert rule(PageCopyTime(save_seconds=0.04, restore_seconds=seconds)).most_restored() == most
        assert rule(PageCopyTime(save_seconds=seconds, restore_seconds=0.04)).most_saved() == most
    assert (rule(None).most_restored(), rule(None).most_saved()) == (128, 128)
