"""Quantized while loading: from every format the same codes as of the whole tensor, and an Orbax round trip."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import HF_CONFIG, expected_params, forward, load_all, write_gguf, write_hf

from models.checkpoint import Checkpoint, open_checkpoint, save_orbax
from models.config import Quantization, WeightFormat
from models.quantization import quantize

QUANTIZATIONS = [
    Quantization(format="int8", embeddings=True),
    Quantization(format="fp8_e4m3"),
    Quantization(format="int4", group_size=16, has_zeros=True),
]
TOKENS = np.array([5, 1, 77, 30, 2, 2, 9], np.int32)


def write(folder: Path, kind: str) -> Checkpoint:
    if kind == "gguf":
        return open_checkpoint(write_gguf(folder / "model.gguf", HF_CONFIG))
    checkpoint = open_checkpoint(write_hf(folder / "hf", HF_CONFIG))
    if kind == "orbax":
        save_orbax(folder / "orbax", checkpoint.config, load_all(checkpoint))
        return open_checkpoint(folder / "orbax")
    return checkpoint


@pytest.mark.parametrize("kind", ["hf", "gguf", "orbax"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=lambda q: q.format)
def test_every_format_is_quantized_as_it_is_read(tmp_path: Path, kind: str, quantization: Quantization) -> None:
    checkpoint = write(tmp_path, kind)
    wide = load_all(checkpoint)
    config = dataclasses.replace(checkpoint.config, quantization=quantization)
    narrow = checkpoint.load(expected_params(config))
    assert set(narrow) == set(expected_params(config))
    for name, array in wide.items():
        scales = narrow.get(name.removesuffix("weight") + "scales")
        if scales is None:
            np.testing.assert_array_equal(narrow[name], array)
            continue
        of_whole = quantize(array, quantization.format, scales.shape[1], jnp.float32)
        assert (narrow[name] == of_whole.codes).mean() > 0.99  # a tie may go either way
        np.testing.assert_allclose(scales, of_whole.scales, rtol=1e-6)
    is_outer = "embed_tokens.scales" in narrow and "lm_head.scales" in narrow
    assert is_outer == quantization.embeddings


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=lambda q: q.format)
def test_an_orbax_round_trip_of_a_quantized_model_gives_the_same_logits(
    tmp_path: Path, quantization: Quantization
) -> None:
    checkpoint = write(tmp_path, "hf")
    config = dataclasses.replace(checkpoint.config, quantization=quantization)
    params = checkpoint.load(expected_params(config))
    save_orbax(tmp_path / "narrow", config, params)
    again = open_checkpoint(tmp_path / "narrow")
    assert again.config == config
    restored = load_all(again)
    positions = np.arange(len(TOKENS))
    logits = forward(config, params, TOKENS, positions)
    np.testing.assert_array_equal(forward(again.config, restored, TOKENS, positions), logits)
    wide = forward(checkpoint.config, load_all(checkpoint), TOKENS, positions)
    closeness: dict[WeightFormat, Any] = {"int8": 0.1, "fp8_e4m3": 0.4, "int4": 1.0}
    assert 0 < np.abs(logits - wide).max() < closeness[quantization.format] * wide.std()
