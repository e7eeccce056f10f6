"""Paged attention against a float64 reference that walks the pages token by token."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    QUANTIZED_CASES,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    HostArray,
    assert_close,
    decode_rows,
    kv_pages,
    make_inputs,
    reference,
    rounded,
)
from kv_format_reference import NARROW
from quick_compilation import QUICK_OPTIONS
from stress import STRESS_CASES, assert_stays_in_bounds, stress_inputs

from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.paged_attention import AttentionRows, Backend, cpu, paged_attention

OPTIONS = ("scale", "sliding_window", "soft_cap", "backend")
# Plain pages are attended to as users have it compiled; narrow ones only add how their numbers are read.
attend = jax.jit(paged_attention, static_argnames=OPTIONS)
attend_narrow = jax.jit(paged_attention, static_argnames=OPTIONS, compiler_options=QUICK_OPTIONS)


@pytest.fixture(params=["xla", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "cpu":
        assert cpu.prepare(None) is None
    return Backend(name=request.param)


def run(
    case: AttentionCase, inputs: AttentionInputs, backend: Backend, cache_dtype: KVDtype | None = None
) -> HostArray:
    dtype = jnp.dtype(case.dtype)
    run_attention = attend if case.kv_dtype is None else attend_narrow
    out = run_attention(
        jnp.asarray(inputs.q, dtype),
        kv_pages(inputs, cache_dtype or case.cache_dtype),
        inputs.block_tables,
        AttentionRows(tables=inputs.tables, starts=inputs.starts, lengths=inputs.lengths),
        scale=inputs.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
        backend=backend,
    )
    assert out.dtype == dtype
    assert out.shape == inputs.q.shape
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("case", [*CASES, *QUANTIZED_CASES], ids=str)
def test_it_equals_the_reference_though_all_it_must_not_read_is_nan(backend: Backend, case: AttentionCase) -> None:
    inputs = make_inputs(case)
    assert np.isnan(inputs.k_pages[0]).all(), "the dummy page must be poisoned"
    assert_close(run(case, inputs, backend), reference(case, rounded(case, inputs)), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", STRESS_CASES, ids=str)
def test_it_stays_within_what_the_format_promises(backend: Backend, case: AttentionCase) -> None:
    inputs = stress_inputs(case)
    assert_stays_in_bounds(case, inputs, run(case, inputs, backend))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", ["gqa", "prefill"])
def test_a_sequence_with_a_broken_scale_breaks_no_neighbour(backend: Backend, name: str, dtype: KVDtype) -> None:
    case = replace(case_named(name), kv_dtype=dtype)
    inputs = make_inputs(case)
    expected, victim = reference(case, rounded(case, inputs)), 3
    pages = inputs.v_pages.copy()
    pages[inputs.block_tables[victim, 0]] = np.nan
    out = run(case, replace(inputs, v_pages=pages), backend)
    neighbours = inputs.tables != victim
    assert_close(out[neighbours], expected[neighbours], TOLERANCE["float32"])
    broken = out[~neighbours & (inputs.lengths > 0)][:, 0]
    assert not np.isfinite(broken).all(axis=-1).any(), "a broken cache must not look like an answer"


def case_named(name: str) -> AttentionCase:
    return next(case for case in CASES if case.name == name)


def test_output_has_the_queries_dtype_where_the_cache_has_another(backend: Backend) -> None:
    case = case_named("gqa")
    inputs = make_inputs(case)
    assert_close(run(case, inputs, backend, cache_dtype="bfloat16"), reference(case, inputs), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", ["gqa", "prefill"])
@pytest.mark.parametrize("poisoned", ["k_pages", "v_pages"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sequence_with_a_broken_cache_breaks_no_neighbour(
    backend: Backend, name: str, poisoned: str, value: float
) -> None:
    case = case_named(name)
    inputs = make_inputs(case)
    expected = reference(case, inputs)
    victim = 3
    pages = getattr(inputs, poisoned).copy()
    pages[inputs.block_tables[victim, 0]] = value
    out = run(case, replace(inputs, **{poisoned: pages}), backend)
    neighbours = inputs.tables != victim
    assert_close(out[neighbours], expected[neighbours], TOLERANCE["float32"])
    first_queries = out[~neighbours & (inputs.lengths > 0)][:, 0]
    if not (poisoned == "k_pages" and value == np.inf):  # keys of ±inf may only win or lose the softmax
        assert not np.isfinite(first_queries).any(), "a broken cache must not look like an answer"


def test_a_row_depends_neither_on_its_place_nor_on_its_neighbours(backend: Backend) -> None:
    case = case_named("gqa")
    inputs = make_inputs(case)
    together = run(case, inputs, backend)
    order = np.random.default_rng(3).permutation(len(case.rows))
    names = ("q", "tables", "starts", "lengths")
    shuffled = run(case, replace(inputs, **{name: getattr(inputs, name)[order] for name in names}), backend)
    np.testing.assert_allclose(shuffled, together[order], atol=1e-6)
    for row in range(len(case.rows)):
        alone = run(case, replace(inputs, **{name: getattr(inputs, name)[row : row + 1] for name in names}), backend)
        np.testing.assert_allclose(alone[0], together[row], atol=1e-6)


def test_a_prompt_in_blocks_equals_the_same_queries_one_by_one(backend: Backend) -> None:
    blocks = AttentionCase(
        name="blocks", heads=4, kv_heads=2, head_dim=64, page_size=16, queries=16, rows=((0, 0, 16), (0, 16, 16))
    )
    inputs = make_inputs(blocks)
    in_blocks = run(blocks, inputs, backend).reshape(32, 4, 64)
    single = replace(
        inputs,
        q=inputs.q.reshape(32, 1, 4, 64),
        tables=np.zeros(32, np.int32),
        starts=np.arange(32, dtype=np.int32),
        lengths=np.arange(1, 33, dtype=np.int32),
    )
    np.testing.assert_allclose(run(replace(blocks, queries=1), single, backend)[:, 0], in_blocks, atol=1e-6)


def test_large_scores_do_not_overflow(backend: Backend) -> None:
    case = AttentionCase(
        name="large", heads=2, kv_heads=1, head_dim=64, page_size=16, queries=1, rows=decode_rows(150, 3)
    )
    inputs = make_inputs(case)
    inputs = replace(inputs, q=inputs.q * 1000)
    assert_close(run(case, inputs, backend), reference(case, inputs), 1e-4)
