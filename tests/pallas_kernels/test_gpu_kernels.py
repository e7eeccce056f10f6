"""The GPU kernels in simulation, against the float64 reference and against XLA's path."""

import contextlib
from dataclasses import replace
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
    assert_close,
    decode_rows,
    kv_pages,
    make_inputs,
    reference,
    rounded,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from quick_compilation import QUICK_OPTIONS

from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import (
    AttentionRows,
    Backend,
    BackendName,
    gpu_cores,
    gpu_mosaic,
    gpu_triton,
    paged_attention,
)
from pallas_kernels.paged_attention.shape import AttentionShape

MODULES = {"gpu_mosaic": gpu_mosaic, "gpu_triton": gpu_triton}
# Each simulation takes seconds: these are enough for every commit, the others run where slow tests do.
QUICK = {
    "gqa",
    "wide_table",
    "prefill_cap_sinks_window",
    "prefill_wide_groups",
    "gqa_int8",
    "prefill_wide_groups_fp8_e4m3",
}
CORES = {"hopper": gpu_cores.Wgmma, "blackwell": gpu_cores.Tcgen05}

can_simulate_mosaic = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"jax {jax.__version__} has no loops, wgmma or copies out in its Mosaic GPU simulator; 0.11 and later have",
)


def shape_of(case: AttentionCase, platform: str = "cpu", capability: float = 0.0) -> AttentionShape:
    return AttentionShape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        block_q=case.queries,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
        platform=platform,
        compute_capability=capability,
    )


def check(backend: BackendName, case: AttentionCase) -> None:
    inputs = make_inputs(case)
    assert np.isnan(inputs.k_pages[0]).all(), "the dummy page must be poisoned"

    def attend(q: jax.Array, kv: KVPages, block_tables: jax.Array, rows: AttentionRows) -> jax.Array:
        return paged_attention(
            q,
            kv,
            block_tables,
            rows,
            scale=inputs.scale,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            sinks=None if inputs.sinks is None else jnp.asarray(inputs.sinks),
            backend=Backend(name=backend, interpret=True),
        )

    rows = AttentionRows(tables=inputs.tables, starts=inputs.starts, lengths=inputs.lengths)
    # Simulations are host callbacks and small loops: optimizing them only takes time.
    compiled = jax.jit(attend, compiler_options=QUICK_OPTIONS)
    out = compiled(jnp.asarray(inputs.q, case.dtype), kv_pages(inputs, case.cache_dtype), inputs.block_tables, rows)
    assert out.dtype == jnp.dtype(case.dtype)
    assert_close(np.asarray(out, np.float32), reference(case, rounded(case, inputs)), TOLERANCE[case.dtype])


def races_are_errors() -> contextlib.AbstractContextManager[None]:
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


def marked(cases: tuple[AttentionCase, ...]) -> list[Any]:
    return [pytest.param(case, marks=[] if case.name in QUICK else [pytest.mark.slow], id=case.name) for case in cases]


@pytest.mark.parametrize("case", marked((*CASES, *QUANTIZED_CASES)))
def test_triton_equals_the_reference_though_all_it_must_not_read_is_nan(case: AttentionCase) -> None:
    reason = gpu_triton.unsupported(shape_of(case))
    if reason is not None:
        assert "power of two" in reason
        pytest.skip(reason)
    check("gpu_triton", case)


@can_simulate_mosaic
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", marked((*CASES, *QUANTIZED_CASES)))
def test_mosaic_has_no_races_and_equals_the_reference_though_all_it_must_not_read_is_nan(
    case: AttentionCase, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, dtype="bfloat16")  # its only precision
    if case.kv_dtype is not None and case.kv_heads == 1:  # smaller pages than these have too few scales to copy
        case = replace(case, page_size=max(case.page_size, 32))
    reason = gpu_mosaic.unsupported(shape_of(case))
    if reason is not None:
        assert case.kv_dtype is not None
        assert "head_dim 80 is not a multiple of 32" in reason
        pytest.skip(reason)
    monkeypatch.setattr(gpu_mosaic, "tensor_core", lambda: CORES[core])
    with races_are_errors():
        check("gpu_mosaic", case)


# Waits, numbered as the kernel is traced: one warpgroup's, or the second's after all of the first's.
DECODE = AttentionCase(  # more blocks than slots
    name="decode", heads=2, kv_heads=1, head_dim=64, page_size=16, queries=1, rows=decode_rows(450)
)
TWO_WARPGROUPS = replace(DECODE, name="two warpgroups", heads=4, queries=32, rows=((0, 100, 32),))
MOST_RUNS = 5  # the simulator's threads meet in another order each time: on a busy machine, one run may hide a race
FAULTS = {
    "a block has come": ("hopper", DECODE, "barrier_wait", 3),
    "a slot is free": ("hopper", DECODE, "barrier_wait", 2),
    "a block has come, for the second warpgroup": ("hopper", TWO_WARPGROUPS, "barrier_wait", 7),
    "values are silenced, for the second warpgroup": ("hopper", TWO_WARPGROUPS, "barrier_wait", 8),
    "softmax weights are in shared memory": ("hopper", DECODE, "commit_smem", 2),
    "results are in shared memory": ("hopper", DECODE, "commit_smem", 3),
    "results have left": ("hopper", DECODE, "wait_smem_to_gmem", 1),
    "queries have come": ("blackwell", DECODE, "barrier_wait", 1),
    "a product's predecessor is loaded": ("blackwell", DECODE, "barrier_wait", 4),
    "a product is there": ("blackwell", DECODE, "barrier_wait", 5),
    "a product is loaded": ("blackwell", DECODE, "wait_load_tmem", 1),
}


@can_simulate_mosaic
@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[] if name == "a block has come" else [pytest.mark.slow], id=name) for name in FAULTS],
)
def test_a_missing_wait_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wait is left out once, and the simulator reports a race, a barrier out of step, or NaN.

    Three it lets pass, as tried with jax 0.12: on Hopper, that the queries have come (the same line is reported on
    Blackwell); that silenced values are in shared memory (the weights' own commit follows before the product); that
    both warpgroups are done before results take the place of blocks, at the very end.
    """
    core, case, function, number = FAULTS[fault]
    original, calls = getattr(plgpu, function), 0

    def forgetful(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != number:
            original(*args)

    monkeypatch.setattr(plgpu, function, forgetful)
    monkeypatch.setattr(gpu_mosaic, "tensor_core", lambda: CORES[core])
    for _ in range(MOST_RUNS):
        calls = 0
        try:
            with races_are_errors():
                check("gpu_mosaic", replace(case, dtype="bfloat16"))
        except (jax.errors.JaxRuntimeError, AssertionError):
            break
    else:
        pytest.fail(f"nothing was reported in {MOST_RUNS} runs")
    assert calls >= number


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("gpu_mosaic", {"compute_capability": 8.0}, "compute capability 8.0"),
        ("gpu_mosaic", {"compute_capability": 12.0}, "compute capability 12.0"),  # Blackwell without tcgen05
        ("gpu_mosaic", {"kv_dtype": "float32"}, "float32"),
        ("gpu_mosaic", {"head_dim": 72}, "head_dim 72"),
        ("gpu_mosaic", {"head_dim": 144}, "head_dim 144"),
        ("gpu_mosaic", {"page_size": 24}, "page_size 24"),
        ("gpu_mosaic", {"page_size": 4}, "page_size 4"),
        ("gpu_mosaic", {"kv_dtype": "int8", "head_dim": 80}, "head_dim 80"),
        ("gpu_mosaic", {"kv_dtype": "int8", "kv_heads": 1}, "page_size 32 has them"),
        ("gpu_triton", {"compute_capability": 7.5}, "compute capability 7.5"),
        ("gpu_triton", {"head_dim": 80}, "head_dim 80"),
    ],
)
def test_what_a_kernel_cannot_do_it_names(backend: str, changes: dict[str, Any], reason: str) -> None:
    shape = shape_of(replace(CASES[0], dtype="bfloat16"), platform="gpu", capability=9.0)
    assert MODULES[backend].unsupported(shape) is None
    assert reason in MODULES[backend].unsupported(replace(shape, **changes))
