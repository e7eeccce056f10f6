"""Checkpoints that come quantized: every layout packed here by its specification, and files of the tools themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden.weights import tiny_weights
from tiny_models import GOLDEN, HF_CONFIG, expected_params, forward, load_all, write_hf

from models.checkpoint import open_checkpoint
from models.checkpoint.base import StoredTensor
from models.checkpoint.packed import PackedScheme, _unpack, unpack_tensors
from models.config import Quantization
from models.errors import CheckpointError, UnsupportedModelError
from models.partition import Spread
from models.quantization import QuantizedMatrix, dequantize

Tensors = dict[str, np.ndarray]
GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32[rows, columns * bits / 32] of codes from 0 on, the first in the lowest bits."""
    in_a_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(codes.shape[0], -1, in_a_word)
    out = np.zeros(parts.shape[:2], np.uint32)
    for place in range(in_a_word):
        out |= parts[:, :, place] << np.uint32(place * bits)
    return out.view(np.int32)


def awq_words(codes: np.ndarray) -> np.ndarray:
    return words(codes.reshape(codes.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].reshape(codes.shape), 4)


def gptq(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensors:
    return {
        "qweight": words_along_rows(codes, 4),
        # One less in whole words, so that a zero point of 0 borrows from its neighbour: GPTQModel does it so.
        "qzeros": (words(zeros.T, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32),
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
        "g_idx": (np.arange(codes.shape[1]) // GROUP).astype(np.int32),
    }


def words_along_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """[in * bits / 32, out] of [out, in]."""
    return np.ascontiguousarray(words(codes, bits).T)


def awq(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> Tensors:
    return {
        "qweight": awq_words(np.ascontiguousarray(codes.T)),
        "qzeros": awq_words(np.ascontiguousarray(zeros.T)),
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }


def pack_quantized(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int = 4) -> Tensors:
    return {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.astype(np.float16),
        "weight_zero_point": words_along_rows(np.ascontiguousarray(zeros.T), bits),
        "weight_shape": np.array(codes.shape, np.int64),
    }


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip


SCHEMES: dict[str, tuple[dict[str, Any], Callable[..., Tensors]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "compressed": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        pack_quantized,
    ),
}


def write(folder: Path, scheme: str, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny model whose layers' matrices are random codes; and the wide matrices by the formats' own formula."""
    quantization, pack = SCHEMES[scheme]
    rng = np.random.default_rng(0)
    stored: Tensors = {}
    wide = {}
    for name, value in tiny_weights(HF_CONFIG).items():
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        out, features_in = value.shape
        codes = rng.integers(0, 16, (out, features_in))
        zeros = rng.integers(0, 16, (out, features_in // GROUP))
        scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{part}": array for part, array in pack(codes, scales, zeros).items()}
        by_group = codes.reshape(out, -1, GROUP) - zeros[:, :, None]
        wide[stem.removeprefix("model.")] = (by_group * scales[:, :, None].astype(np.float64)).reshape(value.shape)
    stored |= changes.pop("tensors", {})
    for name in changes.pop("without", ()):
        del stored[name]
    config = {**HF_CONFIG, "quantization_config": {**quantization, **changes}}
    return write_hf(folder / "model", config, stored), wide


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_int4_means_what_its_format_says(tmp_path: Path, scheme: str) -> None:
    path, wide = write(tmp_path, scheme)
    checkpoint = open_checkpoint(path)
    params = load_all(checkpoint)
    assert set(params) == set(expected_params(checkpoint.config))
    for stem, expected in wide.items():
        matrix = QuantizedMatrix(
            codes=params[f"{stem}.weight"], scales=params[f"{stem}.scales"], zeros=params[f"{stem}.zeros"]
        )
        assert matrix.codes.dtype == jnp.int4
        np.testing.assert_allclose(np.asarray(dequantize(matrix, jnp.float32)), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed_int4", "compressed_fp8"])
def test_a_tools_own_file_means_what_the_tool_reads_in_it(name: str) -> None:
    folder = GOLDEN / "quantized" / name
    checkpoint, golden = open_checkpoint(folder), np.load(folder / "logits.npz")
    token_ids = golden["token_ids"]
    logits = forward(checkpoint.config, load_all(checkpoint), token_ids, np.arange(len(token_ids)))
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_as_compressed_tensors_packs_them(bits: int) -> None:
    golden = np.load(GOLDEN / "packed.npz")
    half = 1 << (bits - 1)
    codes = _unpack(golden[f"{bits}.weight_packed"], bits, axis=1).astype(np.int16) - half
    np.testing.assert_array_equal(codes, golden[f"{bits}.codes"])
    zeros = _unpack(golden[f"{bits}.weight_zero_point"], bits, axis=0).astype(np.int16) - half
    np.testing.assert_array_equal(zeros, golden[f"{bits}.zeros"])


@pytest.mark.parametrize(
    ("dtype", "weights", "layout"),
    [
        (np.int8, {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, "int-quantized"),
        (ml_dtypes.float8_e4m3fn, {"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
        (ml_dtypes.float8_e4m3fn, {"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized"),
    ],
)
def test_eight_bits_are_read_as_they_are(tmp_path: Path, dtype: Any, weights: dict[str, Any], layout: str) -> None:
    stored, by_tensor = {}, weights["strategy"] == "tensor"
    for name, value in tiny_weights(HF_CONFIG).items():
        stored[name] = value
        if name.endswith("_proj.weight"):
            rows = 1 if by_tensor else value.shape[0]
            scale = np.full((rows,) if by_tensor else (rows, 1), np.abs(value).max() / 120, np.float32)
            codes = value / scale.max()
            stored[name] = (np.round(codes) if dtype == np.int8 else codes).astype(dtype)
            stored[name + "_scale"] = scale
    config = {**HF_CONFIG, "quantization_config": compressed(layout, **weights)}
    params = load_all(open_checkpoint(write_hf(tmp_path / "model", config, stored)))
    name = "layers.1.mlp.down_proj"
    np.testing.assert_array_equal(np.asarray(params[f"{name}.weight"]), stored[f"model.{name}.weight"])
    assert params[f"{name}.scales"].shape == (32, 1)
    np.testing.assert_allclose(params[f"{name}.scales"], stored[f"model.{name}.weight_scale"].max())


O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("scheme", "changes", "error", "told"),
    [
        ("gptq", {"without": [f"{O_PROJ}.scales"]}, CheckpointError, r"o_proj.qweight' is quantized, .*o_proj.scales"),
        ("awq", {"without": [f"{O_PROJ}.qzeros"]}, CheckpointError, r"o_proj.qweight' is quantized, .*o_proj.qzeros"),
        ("gptq", {"desc_act": True, "without": [f"{O_PROJ}.g_idx"]}, CheckpointError, "o_proj.g_idx' is not stored"),
        ("gptq", {"tensors": {f"{O_PROJ}.g_idx": np.arange(32)[::-1].astype(np.int32) // GROUP}},
         UnsupportedModelError, r"o_proj.g_idx' puts inputs into groups in an order .* quantize without desc_act"),
        ("gptq", {"tensors": {f"{O_PROJ}.qzeros": np.zeros((2, 8), np.int32)}},
         CheckpointError, r"o_proj.qzeros' has shape \[2, 8\]; 32 rows of 2 groups need \[2, 4\]"),
        ("gptq", {"tensors": {f"{O_PROJ}.g_idx": np.zeros(0, np.int32)}},
         CheckpointError, r"o_proj.g_idx' has shape \[0\]; it takes a group for each of 32 inputs"),
        ("gptq", {"pack_dtype": "int16"}, UnsupportedModelError, "pack_dtype 'int16'; words of int32"),
        ("gptq", {"bits": 3}, UnsupportedModelError, "bits is 3; read are 4 and 8"),
        ("gptq", {"group_size": 24}, CheckpointError, "64 inputs; group_size 24 does not fit"),
        ("gptq", {"group_size": 32}, CheckpointError, r"shape \[4, 32\]; 32 rows of 2 groups need 64 scales"),
        ("awq", {"version": "gemv"}, UnsupportedModelError, "version 'gemv'; of AWQ's layouts gemm is read"),
        ("awq", {"quant_method": "bitsandbytes"}, UnsupportedModelError, "'bitsandbytes'; read are compressed-tensors"),
        ("compressed", {"format": "marlin-24"}, UnsupportedModelError, "format 'marlin-24'"),
        ("compressed", {"transform_config": {"config_groups": {}}}, UnsupportedModelError, "turned weights"),
        ("gptq", {"without": [f"{O_PROJ}.qweight", f"{O_PROJ}.scales", f"{O_PROJ}.qzeros", f"{O_PROJ}.g_idx"],
                  "tensors": {f"{O_PROJ}.weight": np.zeros((32, 32), np.float32)}},
         UnsupportedModelError, "o_proj.weight' is not quantized"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    tmp_path: Path, scheme: str, changes: dict[str, Any], error: type[Exception], told: str
) -> None:
    path, _ = write(tmp_path, scheme, **changes)
    with pytest.raises(error, match=told):
        open_checkpoint(path)


def test_gptq_rounded_in_another_order_is_read_where_its_groups_are_runs(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "gptq", desc_act=True, static_groups=True)
    assert "layers.1.mlp.down_proj.scales" in open_checkpoint(path).names()


def test_zero_points_of_outputs_that_do_not_fill_a_word_leave_its_rest_alone() -> None:
    def tensor(name: str, array: np.ndarray) -> StoredTensor:
        return StoredTensor(file=Path("f"), stored_name=name, shape=array.shape, read=lambda: array)

    out, rng = 12, np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (out, GROUP)), rng.integers(0, 16, (out, 1))
    packed = gptq(codes, np.ones((out, 1)), np.pad(zeros, ((0, 4), (0, 0))))
    tensors = {f"q_proj.{name}": tensor(name, array) for name, array in packed.items()}
    scheme = PackedScheme(
        method="gptq", bits=4, quantization=Quantization(format="int4", group_size=GROUP, has_zeros=True), zero_offset=1
    )
    np.testing.assert_array_equal(unpack_tensors(tensors, scheme)["q_proj.zeros"].read(), zeros - 8)


def test_groups_move_with_the_inputs_that_they_belong_to() -> None:
    # two heads of 4 inputs, the second moved to the end, nothing between; groups of 2
    sources = np.array([0, 1, 2, 3, -1, -1, -1, -1, 4, 5, 6, 7], np.int32)
    spread = Spread(axis=1, stored_size=8, find_sources=lambda: sources)
    groups = spread.of_groups(6)
    assert groups is not None
    assert (groups.sources.tolist(), groups.stored_size) == ([0, 1, -1, -1, 2, 3], 4)
    assert spread.of_groups(2) is None  # groups of 6 would mix the heads
