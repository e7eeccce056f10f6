"""A layer's attention over pages of every format, against float64 attention over the numbers that were written."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compilation import QUICK_OPTIONS

from models.attend import attend
from models.step import StepBatch
from pallas_kernels.kv_dtype import KVDtype, is_quantized
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import XLA, AttentionRows

HEADS, KV_HEADS, PAGE_SIZE = 4, 2, 8
# Of the norm of what is written; the scores are of order 1. A step of int4 is 2 / 15 of the largest of a head.
TOLERANCE: dict[KVDtype, float] = {"float32": 1e-6, "int8": 0.01, "fp8_e4m3": 0.04, "fp8_e5m2": 0.08, "int4": 0.13}


def one_prompt(tokens: int) -> StepBatch:
    """A prompt in one block, on pages 1, 2, ..."""
    positions, nothing = jnp.arange(tokens), jnp.zeros(0, jnp.int32)
    row = AttentionRows(tables=jnp.zeros(1, jnp.int32), starts=jnp.zeros(1, jnp.int32), lengths=jnp.full(1, tokens))
    return StepBatch(
        token_ids=positions,
        positions=positions,
        page_ids=1 + positions // PAGE_SIZE,
        offsets=positions % PAGE_SIZE,
        rope_lengths=positions,
        block_tables=1 + jnp.arange(-(-tokens // PAGE_SIZE))[None],
        decode=AttentionRows(tables=nothing, starts=nothing, lengths=nothing),
        prefill=row,
    )


def error(dtype: KVDtype, *, head_dim: int = 64, outlier: float = 1.0) -> float:
    """Relative error of a prompt's outputs where one channel of keys and values is larger than the others."""
    tokens = 24
    rng = np.random.default_rng(0)
    q = rng.standard_normal((tokens, HEADS, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, tokens, KV_HEADS, head_dim)).astype(np.float32)
    k[..., 3] *= outlier
    v[..., 5] *= outlier
    q[..., 3] /= outlier
    shapes = KVPages.shapes(1 + tokens // PAGE_SIZE, KV_HEADS, PAGE_SIZE, head_dim, dtype)
    pages = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), shapes)
    scale = head_dim**-0.5
    run = jax.jit(
        partial(attend, scale=scale, sliding_window=None, backend=XLA, mesh=None), compiler_options=QUICK_OPTIONS
    )
    out, _ = run(q, k, v, pages, one_prompt(tokens))
    seen = np.tri(tokens, dtype=bool)
    k, v = (x.repeat(HEADS // KV_HEADS, axis=1).astype(np.float64) for x in (k, v))
    scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
    difference = np.asarray(out).reshape(expected.shape) - expected
    quiet = np.arange(head_dim) != 5  # the channels beside the outlier
    return float(np.linalg.norm(difference[..., quiet]) / np.linalg.norm(expected[..., quiet]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_format_attends_to_what_was_written(dtype: KVDtype) -> None:
    found = error(dtype)
    assert found < TOLERANCE[dtype]
    assert not is_quantized(dtype) or found > TOLERANCE[dtype] / 20, "the pages cannot have been of this format"


@pytest.mark.parametrize("head_dim", [80, 96])
def test_4_bits_serve_heads_that_are_no_power_of_two(head_dim: int) -> None:
    assert error("int4", head_dim=head_dim) < TOLERANCE["int4"]


def test_4_bits_survive_a_channel_that_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = error("int4", outlier=30)
    monkeypatch.setattr("models.attend.turn", lambda x: x)
    assert turned < error("int4", outlier=30) / 5
