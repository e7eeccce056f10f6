"""Calibration: a tiny model fitted to tokens answers unseen ones closer than one whose matrices are rounded alone."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import HF_CONFIG, expected_params, forward, load_all, write_hf

from jaxserve.calibration import quantize_calibrated
from jaxserve.errors import ConfigError
from models.checkpoint import open_checkpoint
from models.config import Quantization

INT4 = Quantization(format="int4", group_size=16, has_zeros=True)


def test_a_calibrated_models_logits_are_closer_on_tokens_that_it_was_not_fitted_to(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path / "model", HF_CONFIG))
    config, params = checkpoint.config, load_all(checkpoint)
    narrow_config = replace(config, quantization=INT4)
    rng = np.random.default_rng(0)
    done: list[int] = []
    fitted = quantize_calibrated(
        config, params, rng.integers(96, size=1100).tolist(), INT4, jnp.float32, report=lambda n, total: done.append(n)
    )
    assert done == [1, 2]
    expected = expected_params(narrow_config)
    assert {name: (a.shape, a.dtype) for name, a in fitted.items()} == {
        name: (struct.shape, struct.dtype) for name, struct in expected.items()
    }
    unseen, positions = rng.integers(96, size=120).astype(np.int32), np.arange(120)
    wide = forward(config, params, unseen, positions)
    nearest = forward(narrow_config, checkpoint.load(expected), unseen, positions)
    closer = forward(narrow_config, fitted, unseen, positions)
    assert ((closer - wide) ** 2).mean() < 0.8 * ((nearest - wide) ** 2).mean()


def test_a_text_that_fills_no_window_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path / "model", HF_CONFIG))
    with pytest.raises(ConfigError, match="text has 100 tokens; a window of 128 must be full"):
        quantize_calibrated(checkpoint.config, {}, [3] * 100, INT4, jnp.float32)
