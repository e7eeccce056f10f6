"""Single claims about the engine: what it refuses, how requests end, what it reports."""

from collections.abc import Callable

import pytest
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, collect, drain, tiny_config, tokens_of

from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.scheduling.plan import Request
from jaxserve.simulation.null_runner import NullRunner

MAX_LEN = TINY_MODEL.max_position
ANY_TOKEN = 7


def null_engine(choose: Callable[[Request, int], int] = lambda request, position: ANY_TOKEN, **options: int) -> Engine:
    chosen = TinyOptions(**options)
    runner = NullRunner(choose=choose, block_q=chosen.block_q)
    return Engine(tiny_config(chosen), TINY_MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset({EOS}))


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], SamplingParams(), "prompt", "empty"),
        ([NUM_TOKEN_IDS], SamplingParams(), "prompt", r"token id 150; the vocabulary has ids 0 to 149"),
        ([-1], SamplingParams(), "prompt", "token id -1"),
        ([1], SamplingParams(logit_bias={NUM_TOKEN_IDS: 1.0}), "logit_bias", "token id 150"),
        ([1], SamplingParams(stop_token_ids=(-5,)), "stop_token_ids", "token id -5"),
        ([1], SamplingParams(allowed_token_ids=(1, 2**40)), "allowed_token_ids", str(2**40)),
        ([1], SamplingParams(allowed_token_ids=(1,) * 151), "allowed_token_ids", "151 ids; the vocabulary has 150"),
        ([1], SamplingParams(stop_token_ids=(1,) * 151), "stop_token_ids", "151 ids; the vocabulary has 150"),
        ([1], SamplingParams(bad_word_ids=((1, 150),)), "bad_words", "token id 150"),
        ([1] * MAX_LEN, SamplingParams(), "prompt", r"192 tokens; the limit is 191, and one .*max_model_len"),
        ([1] * (MAX_LEN + 1), SamplingParams(), "prompt", "193 tokens; the limit is 191"),
        ([1] * 100, SamplingParams(max_tokens=93), "max_tokens", "max_tokens is 93 .*100 tokens.* 192 .max_model_len"),
        ([1], SamplingParams(max_tokens=2**31 - 1), "max_tokens", "together they may not exceed 192"),
        ([1] * 100, SamplingParams(min_tokens=93), "min_tokens", "min_tokens is 93"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_by_name(
    prompt: list[int], params: SamplingParams, param: str, message: str
) -> None:
    engine = null_engine()
    before = engine.stats()
    for refuse in (engine.validate, lambda *args: engine.add("bad", *args)):
        with pytest.raises(InvalidRequestError, match=message) as error:
            refuse(prompt, params)
        assert error.value.param == param
    assert engine.stats() == before
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "generated"),
    [(MAX_LEN - 1, None, 1), (MAX_LEN - 2, None, 2), (100, MAX_LEN - 100, 92)],
)
def test_a_request_of_exactly_the_longest_length_is_served(
    prompt_len: int, max_tokens: int | None, generated: int
) -> None:
    engine = null_engine()
    engine.add("a", [3] * prompt_len, SamplingParams(max_tokens=max_tokens))
    outputs = drain(engine)["a"]
    assert len(tokens_of(outputs)) == generated
    assert outputs[-1].finish_reason == "length"


def test_a_small_pool_limits_the_length_and_is_named() -> None:
    engine = null_engine(num_pages=1 + 4)  # 32 tokens have a place, and the last one needs none
    engine.add("a", [3] * 32, SamplingParams())
    assert len(tokens_of(drain(engine)["a"])) == 1
    with pytest.raises(InvalidRequestError, match=r"33 tokens; the limit is 32, .*cache.num_pages"):
        engine.add("b", [3] * 33, SamplingParams())


def test_a_request_id_in_use_is_refused_and_free_again_after_its_end() -> None:
    engine = null_engine()
    engine.add("a", [3], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        engine.add("a", [3], SamplingParams())
    drain(engine)
    engine.add("a", [3], SamplingParams(max_tokens=2))
    assert len(tokens_of(drain(engine)["a"])) == 2


def choose_eos_at_once(request: Request, position: int) -> int:
    return EOS


def test_the_end_of_sequence_ends_the_output_and_is_part_of_it() -> None:
    engine = null_engine(choose_eos_at_once)
    engine.add("a", [3], SamplingParams())
    (output,) = drain(engine)["a"]
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ((EOS,), "stop", EOS)


def test_ignore_eos_goes_on_to_the_limit() -> None:
    engine = null_engine(choose_eos_at_once)
    engine.add("a", [3], SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = drain(engine)["a"]
    assert tokens_of(outputs) == [EOS] * 5
    assert outputs[-1].finish_reason == "length"


def test_a_stop_token_ends_the_output_even_if_the_end_of_sequence_is_ignored() -> None:
    engine = null_engine()
    engine.add("a", [3], SamplingParams(stop_token_ids=(ANY_TOKEN,), ignore_eos=True))
    (output,) = drain(engine)["a"]
    assert (output.finish_reason, output.stop_token_id) == ("stop", ANY_TOKEN)


def test_a_last_token_that_stops_counts_as_a_stop() -> None:
    engine = null_engine(choose_eos_at_once)
    engine.add("a", [3], SamplingParams(max_tokens=1))
    assert drain(engine)["a"][-1].finish_reason == "stop"


@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_request_gets_one_last_output_and_nothing_after(steps: int) -> None:
    engine = null_engine()
    engine.add("a", [3] * 40, SamplingParams())
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    assert engine.has_work()
    (output,) = drain(engine)["a"]
    assert (output.token_ids, output.finish_reason) == ((), "abort")
    assert engine.stats().pages_active == 0


def test_aborting_the_unknown_and_the_finished_changes_nothing() -> None:
    engine = null_engine()
    engine.add("a", [3], SamplingParams(max_tokens=1))
    drain(engine)
    engine.abort("a")
    engine.abort("never seen")
    assert not engine.has_work()


def test_an_id_reused_right_after_an_abort_gets_nothing_of_the_old_request() -> None:
    engine = null_engine(lambda request, _: len(request.token_ids) if request.prompt_len == 40 else ANY_TOKEN)
    engine.add("a", [3] * 40, SamplingParams(prompt_logprobs=0))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        engine.add("a", [3] * 2, SamplingParams())  # the old one's last output would look like the new one's
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    engine.add("a", [3] * 2, SamplingParams(max_tokens=3, prompt_logprobs=0))
    outputs = drain(engine)["a"]
    assert tokens_of(outputs) == [ANY_TOKEN] * 3
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs) == 2


def test_prompt_logprobs_are_whole_though_the_prompt_was_preempted_halfway() -> None:
    engine = null_engine(num_pages=1 + 24, block_q=8, max_num_batched_tokens=8 + 8)
    for i in range(3):
        engine.add(f"short {i}", [3 + i] * 2, SamplingParams(max_tokens=40))
    engine.step()
    # 18 of the 21 free pages, over 18 steps; after 15 of them the short ones ask for their third pages.
    prompt = [10 + i % 100 for i in range(140)]
    engine.add("long", prompt, SamplingParams(max_tokens=3, prompt_logprobs=0))
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work() and not engine.stats().preemptions_total:
        collect(outputs, engine.step())
    assert engine.stats().preemptions_total == 1
    assert "long" not in outputs, "it was preempted too late for this test"
    first = drain(engine)["long"][0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:] if entry is not None] == prompt[1:]


def test_every_token_is_reported_by_the_step_after_the_one_that_samples_it() -> None:
    engine = null_engine()
    engine.add("a", [3], SamplingParams(max_tokens=2))
    assert [len(engine.step()) for _ in range(3)] == [0, 1, 1]
    assert not engine.has_work()


def test_counters_add_up() -> None:
    engine = null_engine()
    for i in range(3):
        engine.add(str(i), [3] * (10 + i), SamplingParams(max_tokens=4))
    assert engine.stats().num_waiting == 3
    engine.step()
    assert engine.stats().num_running == 3
    drain(engine)
    stats = engine.stats()
    assert stats.prompt_tokens_total == 33
    assert stats.output_tokens_total == 12
    assert stats.steps_total == 4


def test_the_integrity_check_finds_a_request_that_no_queue_has() -> None:
    engine = null_engine()
    engine.add("lost", [3], SamplingParams())
    engine._scheduler.finish(engine._requests["lost"], "abort")
    with pytest.raises(AssertionError, match="lost"):
        engine.check_integrity()


def test_sequences_queued_together_are_those_that_would_have_been_added_alone(
    tiny_engine: Callable[..., Engine],
) -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, max_tokens=8, allowed_token_ids=tuple(range(3, 90)), min_tokens=8)
    alone, together = tiny_engine(), tiny_engine()
    for i, choice in enumerate(params.choices()):
        alone.add(f"r-{i}", [5, 6], choice)
    together.queue(["r-0", "r-1", "r-2"], [5, 6], params)
    outputs = drain(together)
    assert {name: tokens_of(several) for name, several in outputs.items()} == {
        name: tokens_of(several) for name, several in drain(alone).items()
    }
    assert len({tuple(tokens_of(several)) for several in outputs.values()}) == 3


def test_sequences_are_queued_together_or_not_at_all() -> None:
    engine = null_engine()
    engine.add("r-1", [5], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequestError, match="r-1"):
        engine.queue(["r-0", "r-1"], [5], SamplingParams(n=2))
    assert engine.stats().num_waiting == 1


def test_many_prompts_with_the_same_long_lists_share_what_is_made_of_them() -> None:
    engine = null_engine()
    params = SamplingParams(max_tokens=2, stop_token_ids=tuple(range(3, 90)), logit_bias={5: 1.0})
    for i in range(20):
        engine.queue([f"r-{i}"], [5, i], params)
    requests = engine._requests.values()
    assert len({id(request.constraints) for request in requests}) == 1
    assert len({id(request.end_token_ids) for request in requests}) == 1


def test_requests_without_a_seed_differ_and_those_with_one_do_not(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine()
    for i in range(3):
        engine.add(f"seeded {i}", [5, 6], SamplingParams(max_tokens=12, seed=9, ignore_eos=True))
        engine.add(f"unseeded {i}", [5, 6], SamplingParams(max_tokens=12, ignore_eos=True))
    outputs = {request_id: tuple(tokens_of(of_request)) for request_id, of_request in drain(engine).items()}
    assert len({outputs[f"seeded {i}"] for i in range(3)}) == 1
    assert len({outputs[f"unseeded {i}"] for i in range(3)}) == 3
