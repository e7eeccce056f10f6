"""The turn that 4-bit pages need: its own inverse, blind to scores, and flat."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.hadamard import turn

DIMS = (2, 16, 64, 80, 96, 128)


@pytest.mark.parametrize("head_dim", DIMS)
def test_turned_twice_is_not_turned_and_scores_stay(head_dim: int) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 5, 3, head_dim)).astype(np.float32)
    turned_q, turned_k = np.asarray(turn(jnp.asarray(q))), np.asarray(turn(jnp.asarray(k)))
    np.testing.assert_allclose(np.asarray(turn(jnp.asarray(turned_q))), q, atol=1e-5)
    np.testing.assert_allclose((turned_q * turned_k).sum(-1), (q * k).sum(-1), atol=1e-4)
    assert not np.allclose(turned_q, q, atol=0.1)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (80, 16), (96, 32), (128, 128)])
def test_one_number_is_spread_evenly_over_its_block(head_dim: int, width: int) -> None:
    for channel in (0, head_dim - 1):
        turned = np.asarray(turn(8.0 * jnp.eye(head_dim)[channel]))
        first = channel // width * width
        np.testing.assert_allclose(np.abs(turned[first : first + width]), 8 / width**0.5, rtol=1e-6)
        assert np.count_nonzero(turned) == width


def test_the_dtype_stays() -> None:
    assert turn(jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16
