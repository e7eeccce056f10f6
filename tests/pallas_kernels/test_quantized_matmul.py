"""The CPU's kernel for narrow weights against numpy in float64, and that a row's bits depend on nothing but the row."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import cpu

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    codes: str
    scales: str
    outputs: int
    inputs: int
    groups: int
    has_zeros: bool


CASES = (
    Case(codes="int8", scales="float32", outputs=96, inputs=576, groups=1, has_zeros=False),
    Case(codes="int8", scales="bfloat16", outputs=1, inputs=32, groups=1, has_zeros=False),
    Case(codes="int8", scales="float32", outputs=50, inputs=384, groups=3, has_zeros=True),
    Case(codes="int4", scales="float32", outputs=70, inputs=576, groups=18, has_zeros=True),
    Case(codes="int4", scales="bfloat16", outputs=47, inputs=96, groups=3, has_zeros=True),
    Case(codes="int4", scales="float32", outputs=64, inputs=256, groups=2, has_zeros=False),
)
multiply = jax.jit(cpu.quantized_matmuls)
TOKENS = 101  # more than a task of tokens, and no multiple of a tile


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    assert cpu.prepare(None) is None


def inputs(case: Case) -> tuple[HostArray, HostArray, HostArray, HostArray | None]:
    """x [TOKENS, in], with sizes that differ from token to token and channel to channel, codes, scales, zeros."""
    rng = np.random.default_rng(0)
    x = (
        rng.normal(size=(TOKENS, case.inputs))
        * rng.choice([1, 30, 1e-3], case.inputs)
        * np.geomspace(1e-3, 1e3, TOKENS)[:, None]
    )
    x[7, :32], x[8] = 0, 0
    codes = (
        rng.integers(-8, 8, (case.outputs, case.inputs))
        if case.codes == "int4"
        else rng.integers(-128, 128, (case.outputs, case.inputs))
    )
    numbers = [rng.uniform(0.5, 2, (case.outputs, case.groups)), rng.uniform(-9, 9, (case.outputs, case.groups))]
    scales, zeros = (n.astype(jnp.dtype(case.scales)) for n in numbers)
    return x.astype(np.float32), codes.astype(jnp.dtype(case.codes)), scales, zeros if case.has_zeros else None


def product(x: HostArray, codes: HostArray, scales: HostArray, zeros: HostArray | None) -> HostArray:
    return np.asarray(multiply(x, [(codes, scales, zeros)])[0])


def rounded(x: HostArray) -> HostArray:
    """As the docstring says: 32 inputs at a time to the nearest of 255 steps."""
    groups = x.astype(np.float64).reshape(len(x), -1, 32)
    step = np.abs(groups).max(axis=2, keepdims=True) / 127
    return (np.round(groups / np.where(step == 0, 1, step)) * step).reshape(x.shape)


def widened(codes: HostArray, scales: HostArray, zeros: HostArray | None) -> HostArray:
    by_group = codes.astype(np.float64).reshape(*scales.shape, -1)
    offsets = 0 if zeros is None else zeros.astype(np.float64)[..., None]
    return ((by_group - offsets) * scales.astype(np.float64)[..., None]).reshape(codes.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.codes}-{case.groups}")
def test_an_answer_is_the_product_with_the_widened_matrix_of_inputs_rounded_by_32(case: Case) -> None:
    x, codes, scales, zeros = inputs(case)
    weight = widened(codes, scales, zeros)
    out = product(x, codes, scales, zeros)
    # An input half way between two steps may fall to the other side than in float64; few do, as the median shows.
    size = np.abs(rounded(x)) @ np.abs(weight).T
    assert (np.abs(out - rounded(x) @ weight.T) <= 2e-3 * size).all()
    assert np.median(np.abs(out - rounded(x) @ weight.T) / np.maximum(size, 1e-30)) < 1e-6
    assert (out[8] == 0).all()


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=["int8", "int4"])
def test_a_tokens_bits_depend_neither_on_its_place_nor_on_its_neighbours(case: Case) -> None:
    x, codes, scales, zeros = inputs(case)
    together = product(x, codes, scales, zeros)
    for tokens in (1, 2, 3, 4, 5, 8):
        np.testing.assert_array_equal(product(x[20 : 20 + tokens], codes, scales, zeros), together[20 : 20 + tokens])
    np.testing.assert_array_equal(product(x[::-1], codes, scales, zeros), together[::-1])


def test_matrices_that_are_multiplied_together_give_what_each_gives_alone() -> None:
    x, codes, scales, zeros = inputs(CASES[3])
    assert zeros is not None
    parts = [(codes[rows], scales[rows], zeros[rows]) for rows in (slice(0, 33), slice(33, 34), slice(34, 70))]
    for out, part in zip(multiply(x, parts), parts, strict=True):
        np.testing.assert_array_equal(out, product(x, *part))
        assert (np.abs(out).max(axis=0) > 0).all()


def test_a_token_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    x, codes, scales, zeros = inputs(CASES[3])
    alone = product(x, codes, scales, zeros)
    x[20, 40], x[21, 570] = np.nan, -np.inf
    out = product(x, codes, scales, zeros)
    assert not np.isfinite(out[20:22]).any()
    np.testing.assert_array_equal(np.delete(out, [20, 21], axis=0), np.delete(alone, [20, 21], axis=0))


PROGRAM = """
import os, sys
if sys.argv[1] == "one": os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
import test_quantized_matmul as test
assert test.cpu.prepare(None) is None
np.savez(sys.argv[2], *(test.product(*test.inputs(case)) for case in test.CASES))
"""


@pytest.mark.parametrize(("compiler", "cpus"), [("cc -mno-avx512f", "all"), ("cc -mno-avx", "one")])
def test_neither_the_compilers_vectors_nor_the_threads_change_a_bit(compiler: str, cpus: str, tmp_path: Path) -> None:
    """Narrower registers, and no instruction for products of bytes: what other machines have."""
    if os.uname().machine != "x86_64":
        pytest.skip("these flags are of x86 compilers")
    environment = os.environ | {"CC": compiler, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", PROGRAM, cpus, str(tmp_path / "out.npz")], env=environment, check=True)
    with np.load(tmp_path / "out.npz") as found:
        for case, out in zip(CASES, found.values(), strict=True):
            np.testing.assert_array_equal(out, product(*inputs(case)))


def test_what_the_kernel_cannot_multiply_is_said_in_a_line() -> None:
    fitting: dict[str, Any] = {"code_dtype": "int4", "scale_dtype": "float32", "group_size": 32, "features_in": 576}
    assert cpu.unsupported(**fitting) is None
    for change, reason in (
        ({"code_dtype": "float8_e4m3fn"}, "the codes are float8_e4m3fn, not int8 or int4"),
        ({"scale_dtype": "float16"}, "the scales are float16, not float32 or bfloat16 (model.dtype)"),
        (
            {"group_size": 16},
            "groups of 16 (the checkpoint's, or else model.quantization_group_size) are no multiple of 32",
        ),
        ({"features_in": 48}, "a matrix has 48 inputs, no multiple of 32"),
    ):
        assert cpu.unsupported(**fitting | change) == reason


@pytest.mark.parametrize(
    ("groups", "zeros", "reason"),
    [(4, (8, 4), "groups of 16 "), (2, (8, 1), "zeros unlike scales"), (3, (8, 3), "64 inputs, 3 groups")],
)
def test_what_c_cannot_divide_is_refused_before_it_is_compiled(
    groups: int, zeros: tuple[int, int], reason: str
) -> None:
    x, codes = jnp.ones((2, 64)), jnp.ones((8, 64), jnp.int8)
    with pytest.raises(AssertionError, match=reason):
        cpu.quantized_matmuls(x, [(codes, jnp.ones((8, groups)), jnp.ones(zeros))])
