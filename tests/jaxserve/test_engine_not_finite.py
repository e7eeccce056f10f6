"""Numbers that are none end the request they belong to, and nothing else."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from tiny_engine import drain, tiny_params, tokens_of

from jaxserve.engine import Engine
from jaxserve.request import SamplingParams

POISON = 97  # the token whose embedding is made NaN or infinite


def poisoned(value: float) -> Any:
    flat = nnx.to_flat_state(tiny_params())
    return nnx.from_flat_state(
        [
            (path, param.replace(param.get_value().at[POISON].set(value)) if path[0] == "embed_tokens" else param)
            for path, param in flat
        ]
    )


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_its_own_request_alone(
    tiny_engine: Callable[..., Engine], value: float, temperature: float
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    prompts = {f"good-{i}": [5 + i, 6, 7] * (i + 1) for i in range(4)}
    whole = tiny_engine()
    for name, prompt in prompts.items():
        whole.add(name, prompt, params)
    expected = {name: tokens_of(outputs) for name, outputs in drain(whole).items()}
    assert all(POISON not in tokens for tokens in expected.values())

    engine = tiny_engine(params=poisoned(value))
    engine.add("bad-short", [POISON], params)
    for name, prompt in prompts.items():
        engine.add(name, prompt, params)
    engine.add("bad-long", [5] * 40 + [POISON] + [6] * 40, params)
    outputs = drain(engine)
    for name in prompts:
        assert tokens_of(outputs[name]) == expected[name]
        assert outputs[name][-1].finish_reason == "length"
    for name in ("bad-short", "bad-long"):
        assert [output.finish_reason for output in outputs[name]] == ["error"]
        assert "not finite" in (outputs[name][0].error or "")
    engine.check_integrity()
    assert engine.stats().pages_active == 0

    # Whoever gets the pages next finds nothing of it.
    engine.add("after", prompts["good-3"], params)
    assert tokens_of(drain(engine)["after"]) == expected["good-3"]


def test_a_row_that_turns_bad_while_decoding_keeps_what_came_before(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine(params=poisoned(jnp.nan))
    params = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={POISON: 100.0})
    engine.add("r", [5, 6, 7], params)
    outputs = drain(engine)["r"]
    assert tokens_of(outputs) == [POISON]  # its own token is well; the one after it is computed from NaN
    assert [output.finish_reason for output in outputs] == [None, "error"]
