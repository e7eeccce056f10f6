"""What only the CPU's kernel promises: exact formats, rows that depend on nothing, and a compiler that may lack."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import AttentionCase, AttentionInputs, HostArray, assert_close, decode_rows, make_inputs, reference
from kv_format_reference import NARROW, NUMBERS

from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import AttentionRows, Backend, cpu, paged_attention

attend = jax.jit(paged_attention, static_argnames=("scale", "sliding_window", "soft_cap", "backend"))


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    assert cpu.prepare(None) is None


def run(case: AttentionCase, inputs: AttentionInputs, pages: KVPages | None = None) -> HostArray:
    if pages is None:
        pages = float_pages(np.concatenate([inputs.k_pages, inputs.v_pages], axis=-1))
    out = attend(
        jnp.asarray(inputs.q),
        pages,
        inputs.block_tables,
        AttentionRows(tables=inputs.tables, starts=inputs.starts, lengths=inputs.lengths),
        scale=inputs.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
        backend=Backend(name="cpu"),
    )
    return np.asarray(out)


def float_pages(data: HostArray, dtype: KVDtype = "float32") -> KVPages:
    return KVPages(data=jnp.asarray(data, jnp.dtype(dtype)), scales=None, dtype=dtype)


def case_with(**values: int | tuple[tuple[int, int, int], ...] | None) -> AttentionCase:
    case = AttentionCase(name="", heads=4, kv_heads=2, head_dim=64, page_size=16, queries=1, rows=decode_rows(70, 3))
    return replace(case, **values)


@pytest.mark.parametrize("columns", [*range(1, 19), 33])
def test_any_number_of_heads_may_share_a_kv_head(columns: int) -> None:
    """Few lie across the registers and many along them, in tiles of every size."""
    case = case_with(heads=2 * columns, head_dim=16)
    inputs = make_inputs(case)
    assert_close(run(case, inputs), reference(case, inputs), 1e-5)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("head_dim", [1, 8, 24, 80, 100, 320])
def test_a_head_need_not_fill_registers(head_dim: int, queries: int) -> None:
    case = case_with(head_dim=head_dim, queries=queries, rows=((0, 61, queries), (1, 0, queries)))
    inputs = make_inputs(case)
    assert_close(run(case, inputs), reference(case, inputs), 1e-5)


def test_long_rows_are_cut_and_merged() -> None:
    rows = ((0, 4095, 9), (1, 0, 1), (2, 5000, 3))
    for case in (
        case_with(queries=9, rows=rows),
        case_with(queries=9, rows=rows, sliding_window=1000),
        case_with(rows=decode_rows(255, 256, 257, 1000)),
    ):
        inputs = make_inputs(case)
        assert_close(run(case, inputs), reference(case, inputs), 1e-5)


@pytest.mark.parametrize("queries", [1, 9])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_its_neighbours(queries: int) -> None:
    case = case_with(queries=queries, rows=((0, 700, queries), (1, 5, queries), (2, 300, queries), (0, 0, 0)))
    inputs = make_inputs(case)
    together = run(case, inputs)
    for row in range(4):
        own = {name: getattr(inputs, name)[row : row + 1] for name in ("q", "tables", "starts", "lengths")}
        np.testing.assert_array_equal(run(case, replace(inputs, **own))[0], together[row])


def test_queries_that_are_padding_give_zero() -> None:
    case = case_with(queries=9, rows=((0, 30, 4), (0, 0, 0)))
    out = run(case, make_inputs(case))
    assert np.abs(out[0, :4]).min() > 0
    assert not out[0, 4:].any()
    assert not out[1].any()


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", *NARROW])
def test_pages_of_any_format_give_the_bits_of_float32_pages_with_the_same_numbers(
    dtype: KVDtype, head_dim: int
) -> None:
    """Widening is exact, subnormal numbers included: a code has at most 8 significant bits, and so has a scale."""
    case = case_with(head_dim=head_dim, rows=decode_rows(70, 33))
    inputs = make_inputs(case)
    rng = np.random.default_rng(0)
    shape = (*inputs.k_pages.shape[:-1], head_dim)
    if dtype in NARROW:
        codes = [
            rng.integers(-8, 8, shape, np.int8) if dtype == "int4" else finite_codes(rng, shape, dtype) for _ in "kv"
        ]
        scales = rng.choice(np.float32([0.5, 0.0078125, 0.01171875]), (*shape[:2], 2, shape[2])).astype(
            ml_dtypes.bfloat16
        )
        packed = (codes[0] & 15) | (codes[1] << 4) if dtype == "int4" else np.concatenate(codes, axis=-1)
        narrow = KVPages(data=jnp.asarray(packed), scales=jnp.asarray(scales.view(np.int16)), dtype=dtype)
        factors = np.moveaxis(scales.astype(np.float32), 2, 0)[..., None]
        wide = np.concatenate([NUMBERS[dtype][c.view(np.uint8)] * f for c, f in zip(codes, factors, strict=True)], -1)
    else:
        numbers = rng.standard_normal((*shape[:-1], 2 * head_dim)) * rng.choice([1, 1e-5, 1e-7], shape[:-1])[..., None]
        narrow = float_pages(numbers, dtype)
        wide = np.asarray(narrow.data).astype(np.float32)
    np.testing.assert_array_equal(run(case, inputs, narrow), run(case, inputs, float_pages(wide)))


def finite_codes(rng: np.random.Generator, shape: tuple[int, ...], dtype: KVDtype) -> HostArray:
    codes = np.flatnonzero(np.abs(NUMBERS[dtype]) <= 2)  # small: one large number would be all that a softmax sees
    assert len(codes) > 4
    return rng.choice(codes, shape).astype(np.uint8).view(np.int8)


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a process that has not loaded the kernel yet."""
    monkeypatch.setattr(cpu._CALL, "is_registered", False)
    return monkeypatch


def test_without_a_compiler_it_says_what_it_looked_for(unprepared: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unprepared.setenv("PATH", str(tmp_path))
    unprepared.delenv("CC", raising=False)
    assert cpu.prepare(tmp_path) == "no C compiler is on the PATH (looked for cc, gcc, clang)"
    unprepared.setenv("CC", "mycc -m64")
    assert cpu.prepare(tmp_path) == "no C compiler is on the PATH (looked for mycc)"
    assert not any(tmp_path.iterdir())


def test_of_a_broken_compiler_the_first_error_is_told(unprepared: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "a note\ncpu.c:1: error: no memory" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    unprepared.setenv("CC", str(compiler))
    assert cpu.prepare(tmp_path / "native") == f"{compiler}: cpu.c:1: error: no memory"
    assert not any((tmp_path / "native").iterdir())


def test_a_compiler_that_reorders_sums_fails_the_self_check() -> None:
    """(x + c) - c, by which the exponential rounds, is x to a compiler that may calculate as with real numbers.

    In a process of its own: loading such a library turns off subnormal numbers for whoever loads it.
    """
    program = "from pallas_kernels.paged_attention import cpu; print(cpu.prepare(None))"
    environment = os.environ | {"CC": "cc -ffast-math", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("what the C compiler made of paged_attention/cpu.c is wrong: answers are off by ")


def test_a_folder_of_others_is_not_trusted(unprepared: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert cpu.prepare(tmp_path) == f"{tmp_path} belongs to another user, or everyone can write to it"


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from pallas_kernels.paged_attention import cpu\n"
        "reason = cpu.prepare(Path(sys.argv[1])); assert reason is None, reason"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "native")]
    both = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    (library,) = (tmp_path / "native").iterdir()
    assert library.name.startswith("paged_attention-")
    assert library.suffix == ".so"
    made = library.stat().st_mtime_ns
    subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)
    assert library.stat().st_mtime_ns == made, "found, not made again"
