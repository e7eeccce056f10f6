"""The TPU kernel in jax's simulator, which fills memory with NaN, checks every index and can watch for races."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

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
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # neither verdict nor copies have a public name
from jax.experimental.pallas import tpu as pltpu
from quick_compilation import QUICK_OPTIONS
from stress import STRESS_CASES, assert_stays_in_bounds, stress_inputs

from pallas_kernels.paged_attention import tpu
from pallas_kernels.paged_attention.shape import AttentionShape
from pallas_kernels.paged_attention.tpu_stream import Stream

LAZY = pltpu.InterpretParams()  # a copy arrives when it is waited for: without the wait, NaN
EAGER = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)
TWO_CORES = pltpu.InterpretParams(num_cores_or_threads=2)

# One of each: unequal rows, several programs, values in their own registers, blocks, and all options together.
QUICK = {
    "gqa",
    "mqa_bfloat16",
    "prefill_cap_sinks_window",
    "page_128_int8",
    "page_128_int4",
    "page_128_prefill_fp8_e4m3",
}
QUICK_RACES = {"many_rows", "prefill_window_40", "page_128_int8"}


def shape_of(case: AttentionCase) -> AttentionShape:
    return AttentionShape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        block_q=case.queries,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
        platform="tpu",
    )


def cases(quick: set[str], table: tuple[AttentionCase, ...]) -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in quick else pytest.mark.slow)
        for case in table
        if tpu.unsupported(shape_of(case)) is None
    ]


@pytest.fixture(autouse=True)
def fresh_simulator() -> Iterator[None]:
    yield
    pltpu.reset_tpu_interpret_mode_state()


def call_of(case: AttentionCase, inputs: AttentionInputs, simulator: pltpu.InterpretParams) -> tuple[Any, ...]:
    """The kernel as a function, and its arguments."""
    attend = functools.partial(
        tpu.paged_attention,
        scale=inputs.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=None if inputs.sinks is None else jnp.asarray(inputs.sinks),
        interpret=simulator,
    )
    q = jnp.asarray(inputs.q, case.dtype)
    return (
        attend,
        q,
        kv_pages(inputs, case.cache_dtype),
        inputs.block_tables,
        inputs.tables,
        inputs.starts,
        inputs.lengths,
    )


def run(case: AttentionCase, inputs: AttentionInputs, simulator: pltpu.InterpretParams) -> HostArray:
    attend, *arguments = call_of(case, inputs, simulator)
    # The simulation is all host callbacks: optimizing what lies between them only takes time.
    out = jax.jit(attend, compiler_options=QUICK_OPTIONS)(*arguments)
    assert out.shape == inputs.q.shape
    assert out.dtype == jnp.dtype(case.dtype)
    return np.asarray(out, np.float32)


def case_named(name: str) -> AttentionCase:
    return next(case for case in (*CASES, *QUANTIZED_CASES) if case.name == name)


@pytest.mark.parametrize("case", cases(QUICK, (*CASES, *QUANTIZED_CASES)))
def test_simulated_kernel_equals_the_reference_though_all_it_must_not_read_is_nan(case: AttentionCase) -> None:
    inputs = make_inputs(case)
    assert_close(run(case, inputs, LAZY), reference(case, rounded(case, inputs)), TOLERANCE[case.dtype])


# Numbers of 8 bits are all copied alike.
@pytest.mark.parametrize(
    "case", cases(QUICK_RACES, (*CASES, *(case for case in QUANTIZED_CASES if case.kv_dtype in ("int8", "int4"))))
)
def test_copies_and_reads_never_race(case: AttentionCase) -> None:
    inputs = make_inputs(case)
    assert_close(run(case, inputs, EAGER), reference(case, rounded(case, inputs)), TOLERANCE[case.dtype])
    assert not interpret_pallas_call.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize("case", STRESS_CASES, ids=str)
def test_simulated_kernel_stays_within_what_the_format_promises(case: AttentionCase) -> None:
    case = replace(case, page_size=128, head_dim=128)
    if case.name.startswith("long"):  # one KV head: of more, only the simulation would be longer
        case = replace(case, heads=2, kv_heads=1)
    inputs = stress_inputs(case)
    assert_stays_in_bounds(case, inputs, run(case, inputs, LAZY))


def test_the_detector_catches_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait", lambda self, buffer: None)
    case = case_named("only_padding")
    case = replace(case, rows=((0, 20, 1),))
    found = ""
    try:
        run(case, make_inputs(case), EAGER)
    except jax.errors.JaxRuntimeError as error:  # jax 0.12 stops at the first race, 0.10 goes on
        found = str(error).lower()
    assert "race" in found or interpret_pallas_call.races.races_found


@dataclass
class Copies:
    """What the simulator was asked to copy out of HBM: how often each page, and how many bytes of block tables."""

    pages: Counter[int] = field(default_factory=Counter)
    table_entries: int = 0


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    found = Copies()
    start_copy = interpret_pallas_call.dma_start

    def counted(
        token: Any, device: Any, core: Any, space: Any, source: Any, transforms: Any, *rest: Any, **kw: Any
    ) -> Any:
        (indexer,) = transforms  # of HBM: one `.at`, into the pages or the flat block tables
        if len(indexer.shape) == 1:
            found.table_entries += int(indexer.indices[0].size)
        else:
            page, *whole = indexer.indices
            assert [int(part.size) for part in whole] == list(indexer.shape[1:])
            found.pages[int(page)] += 1
        return start_copy(token, device, core, space, source, transforms, *rest, **kw)

    monkeypatch.setattr(interpret_pallas_call, "dma_start", counted)
    return found


def pages_seen(case: AttentionCase, inputs: AttentionInputs) -> Counter[int]:
    """How often each page must be copied: once for each row with a query that sees a key of it."""
    seen: Counter[int] = Counter()
    for table, start, length in zip(inputs.tables, inputs.starts, inputs.lengths, strict=True):
        first = 0 if case.sliding_window is None else max(0, int(start) - case.sliding_window + 1)
        numbers = range(first // case.page_size, -(-int(length) // case.page_size))
        seen.update(int(inputs.block_tables[table, number]) for number in numbers)
    return seen


@pytest.mark.parametrize("name", ["gqa", "window_70", "shared_pages"])
def test_decoding_ragged_rows_copies_each_page_that_a_row_sees_once_and_no_other(name: str, copies: Copies) -> None:
    case = case_named(name)
    inputs = make_inputs(case)
    run(case, inputs, LAZY)
    assert copies.pages == pages_seen(case, inputs)


def test_the_cost_estimate_is_the_bytes_that_full_block_tables_make_the_kernel_copy(copies: Copies) -> None:
    case = AttentionCase(
        name="full", heads=8, kv_heads=2, head_dim=128, page_size=16, queries=1, rows=decode_rows(*(64,) * 8)
    )
    inputs = make_inputs(case)
    attend, *arguments = call_of(case, inputs, LAZY)
    estimate = estimated_bytes(jax.make_jaxpr(attend)(*arguments).jaxpr)
    run(case, inputs, LAZY)
    page_bytes = case.kv_heads * case.page_size * 2 * case.head_dim * 4
    assert estimate == copies.pages.total() * page_bytes + copies.table_entries * 4 + 2 * inputs.q.nbytes


def estimated_bytes(jaxpr: Any) -> int:
    estimates = [equation.params["cost_estimate"] for equation in jaxpr.eqns if "cost_estimate" in equation.params]
    (estimate,) = estimates
    return int(estimate.bytes_accessed)


def test_rows_are_shared_among_the_cores_of_a_chip() -> None:
    case = replace(case_named("gqa"), rows=decode_rows(*range(1, 120, 7)))
    inputs = make_inputs(case)
    assert_close(run(case, inputs, TWO_CORES), reference(case, inputs), TOLERANCE["float32"])


def test_a_sequence_with_a_broken_cache_breaks_no_neighbour_though_they_share_a_step() -> None:
    case = case_named("gqa")
    inputs = make_inputs(case)
    expected = reference(case, inputs)
    victim = 4
    pages = inputs.v_pages.copy()
    pages[inputs.block_tables[victim, 0]] = np.inf
    out = run(case, replace(inputs, v_pages=pages), LAZY)
    neighbours = inputs.tables != victim
    assert_close(out[neighbours], expected[neighbours], TOLERANCE["float32"])
    assert not np.isfinite(out[victim]).any(), "a broken cache must not look like an answer"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_size": 8}, "page_size is 8; bfloat16 pages must be a power of two of at least 16"),
        ({"page_size": 48}, "page_size is 48"),
        ({"kv_dtype": "int8"}, "page_size is 16; int8 pages must be a power of two of at least 128"),
        (
            {"kv_dtype": "int4", "page_size": 128, "head_dim": 64},
            "head_dim is 64; int4 pages have lines of head_dim bytes",
        ),
        ({"kv_dtype": "float16"}, "keys and values are float16"),
        ({"head_dim": 512}, "head_dim is 512"),
    ],
)
def test_what_cannot_be_served_is_said(change: dict[str, object], reason: str) -> None:
    shape = AttentionShape(
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=16,
        block_q=64,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        platform="tpu",
    )
    assert tpu.unsupported(shape) is None
    assert reason in str(tpu.unsupported(replace(shape, **change)))
