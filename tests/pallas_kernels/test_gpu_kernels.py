"""The GPU kernels in simulation, against the float64 reference and against XLA's path."""

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, AttentionCase, AttentionInputs, HostArray, decode_rows, make_inputs, reference
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import AttentionRows, Backend, BackendName, gpu_mosaic, gpu_triton, paged_attention
from pallas_kernels.paged_attention.shape import AttentionShape

MODULES = {"gpu_mosaic": gpu_mosaic, "gpu_triton": gpu_triton}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
# Each simulation takes seconds: these cases are enough for every commit, the others run where slow tests do.
QUICK = {"gqa", "wide_table", "prefill", "window_16", "prefill_window_5", "only_padding"}
CORES = {"hopper": gpu_mosaic.Wgmma, "blackwell": gpu_mosaic.Tcgen05}

can_simulate_mosaic = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"jax {jax.__version__} has no loops, wgmma or copies out in its Mosaic GPU simulator; 0.11 and later have",
)


def shape_of(case: AttentionCase, dtype: str, platform: str = "cpu", capability: float = 0.0) -> AttentionShape:
    return AttentionShape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        block_q=case.queries,
        dtype=dtype,
        kv_dtype=dtype,
        platform=platform,
        compute_capability=capability,
    )


def rounded(inputs: AttentionInputs, dtype: str) -> AttentionInputs:
    names = ("q", "k_pages", "v_pages")
    return replace(inputs, **{n: np.asarray(jnp.asarray(getattr(inputs, n), dtype), np.float32) for n in names})


def run(backend: BackendName, case: AttentionCase, inputs: AttentionInputs, dtype: str, **options: Any) -> HostArray:
    kv_pages = jnp.asarray(np.concatenate([inputs.k_pages, inputs.v_pages], axis=-1), dtype)
    rows = AttentionRows(tables=inputs.tables, starts=inputs.starts, lengths=inputs.lengths)
    attend = jax.jit(
        lambda q, kv_pages, block_tables, rows: paged_attention(
            q,
            kv_pages,
            block_tables,
            rows,
            scale=inputs.scale,
            sliding_window=case.sliding_window,
            backend=Backend(name=backend, interpret=backend != "xla"),
            **options,
        )
    )
    out = attend(jnp.asarray(inputs.q, dtype), kv_pages, inputs.block_tables, rows)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def check(backend: BackendName, case: AttentionCase, dtype: str) -> None:
    inputs = rounded(make_inputs(case), dtype)
    assert np.isnan(inputs.k_pages[0]).all(), "the dummy page must be poisoned"
    out, expected = run(backend, case, inputs, dtype), reference(case, inputs)
    real = ~np.isnan(expected)
    np.testing.assert_allclose(out[real], expected[real], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def races_are_errors() -> contextlib.AbstractContextManager[None]:
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


def marked(cases: tuple[AttentionCase, ...]) -> list[Any]:
    return [pytest.param(case, marks=[] if case.name in QUICK else [pytest.mark.slow], id=case.name) for case in cases]


@pytest.mark.parametrize("case", marked(CASES))
def test_triton_equals_the_reference_though_all_it_must_not_read_is_nan(case: AttentionCase) -> None:
    reason = gpu_triton.unsupported(shape_of(case, case.dtype))
    if reason is not None:
        assert "power of two" in reason
        pytest.skip(reason)
    check("gpu_triton", case, case.dtype)


@can_simulate_mosaic
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", marked(CASES))
def test_mosaic_has_no_races_and_equals_the_reference_though_all_it_must_not_read_is_nan(
    case: AttentionCase, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_mosaic.unsupported(shape_of(case, "bfloat16")) is None
    monkeypatch.setattr(gpu_mosaic, "tensor_core", lambda: CORES[core])
    with races_are_errors():
        check("gpu_mosaic", case, "bfloat16")


@can_simulate_mosaic
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["wide_rows", pytest.param("wide_heads", marks=pytest.mark.slow)])
def test_mosaic_warpgroups_of_one_program_do_not_race(name: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ((0, 0, 32), (1, 100, 32), (2, 7, 5))
    case = AttentionCase(
        name=name, heads=4, kv_heads=1, head_dim=64, page_size=16, queries=32, rows=blocks, sliding_window=70
    )
    if name == "wide_heads":
        case = replace(case, head_dim=256)
    monkeypatch.setattr(gpu_mosaic, "tensor_core", lambda: CORES[core])
    with races_are_errors():
        check("gpu_mosaic", case, "bfloat16")


@can_simulate_mosaic
def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waits = plgpu.barrier_wait, []

    def forgetful(barrier: Any) -> None:
        waits.append(barrier)
        if len(waits) != 3:  # the queries', the free slot's, and the third: that a block has come
            wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful)
    case = AttentionCase(name="", heads=2, kv_heads=1, head_dim=64, page_size=16, queries=1, rows=decode_rows(40))
    with races_are_errors(), pytest.raises(jax.errors.JaxRuntimeError, match=r"[Rr]ace"):
        check("gpu_mosaic", case, "bfloat16")
    assert len(waits) == 3


@pytest.mark.parametrize("backend", [pytest.param("gpu_mosaic", marks=can_simulate_mosaic), "gpu_triton"])
def test_soft_cap_sinks_and_window_together_equal_xla(backend: BackendName) -> None:
    rows = ((0, 0, 8), (0, 40, 8), (1, 9, 3), (0, 0, 0))
    case = AttentionCase(
        name="", heads=4, kv_heads=2, head_dim=64, page_size=16, queries=8, rows=rows, sliding_window=20
    )
    inputs = rounded(make_inputs(case), "float16")
    options = {"soft_cap": 2.0, "sinks": jnp.array([0.0, 3.0, -2.0, 1.0])}
    expected = run("xla", case, inputs, "float16", **options)
    out = run(backend, case, inputs, "float16", **options)
    real = ~np.isnan(reference(case, inputs))
    np.testing.assert_allclose(out[real], expected[real], atol=TOLERANCE["float16"])
    assert np.abs(out - run("xla", case, inputs, "float16"))[real].max() > 0.05, "the options should matter"


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("gpu_mosaic", {"compute_capability": 8.0}, "compute capability 8.0"),
        ("gpu_mosaic", {"kv_dtype": "float32"}, "float32"),
        ("gpu_mosaic", {"head_dim": 72}, "head_dim 72"),
        ("gpu_mosaic", {"head_dim": 144}, "head_dim 144"),
        ("gpu_mosaic", {"page_size": 24}, "page_size 24"),
        ("gpu_mosaic", {"page_size": 4}, "page_size 4"),
        ("gpu_triton", {"compute_capability": 7.5}, "compute capability 7.5"),
        ("gpu_triton", {"head_dim": 80}, "head_dim 80"),
        ("gpu_triton", {"kv_dtype": "int8"}, "int8"),
    ],
)
def test_what_a_kernel_cannot_do_it_names(backend: str, changes: dict[str, Any], reason: str) -> None:
    shape = replace(shape_of(CASES[0], "bfloat16", platform="gpu", capability=9.0), page_size=16, head_dim=64)
    assert MODULES[backend].unsupported(shape) is None
    assert reason in MODULES[backend].unsupported(replace(shape, **changes))
