"""The forward pass against transformers' float32 logits, and the three checkpoint formats against each other."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    GOLDEN,
    VARIANTS,
    expected_params,
    forward,
    golden_config,
    llama_metadata,
    load_all,
    write_gguf,
    write_hf,
)

from models.checkpoint import Checkpoint, open_checkpoint, resolve_model, save_orbax
from models.config import ModelConfig, RopeConfig
from models.layers import rope_tables

LENGTHS = (24, 160)
TOLERANCE = 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, golden_config(variant)))
    assert_matches_golden(checkpoint, variant)


def test_folder_written_by_transformers_in_bfloat16_shards_matches() -> None:
    assert_matches_golden(open_checkpoint(GOLDEN / "sharded"), "sharded")


def assert_matches_golden(checkpoint: Checkpoint, variant: str) -> None:
    params = load_all(checkpoint)
    golden = np.load(GOLDEN / variant / "logits.npz")
    for length in LENGTHS:
        token_ids, positions = golden[f"{length}.token_ids"], golden[f"{length}.positions"]
        logits = forward(checkpoint.config, params, token_ids, positions)
        np.testing.assert_allclose(logits, golden[f"{length}.logits"], rtol=0, atol=TOLERANCE)


def test_matrices_in_bfloat16_between_float32_activations_stay_near(tmp_path: Path) -> None:
    """What a CPU runs for `model.dtype: bfloat16`: two roundings a product, 2^-8 each, and none in between."""
    checkpoint = open_checkpoint(write_hf(tmp_path, golden_config("llama_gqa_untied")))
    golden = np.load(GOLDEN / "llama_gqa_untied" / "logits.npz")
    token_ids, positions = golden["24.token_ids"], golden["24.positions"]
    logits = forward(checkpoint.config, load_all(checkpoint, jnp.bfloat16), token_ids, positions)
    error = np.square(logits - golden["24.logits"]).mean() ** 0.5 / golden["24.logits"].std()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize(
    "variant", [*(name for name in VARIANTS if name.startswith("rope_")), "mistral_sliding", "llama_theta"]
)
def test_golden_would_notice_a_variant_that_is_ignored(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, golden_config(variant)))
    golden = np.load(GOLDEN / variant / "logits.npz")
    plain = {"architecture": "LlamaForCausalLM", "max_position": 256, "eos_token_ids": (2,)}  # compiled once for all
    ignored = dataclasses.replace(checkpoint.config, rope=RopeConfig(), sliding_window=None, **plain)
    logits = forward(ignored, load_all(checkpoint), golden["160.token_ids"], golden["160.positions"])
    assert np.abs(logits - golden["160.logits"])[-1].max() > 30 * TOLERANCE


@pytest.mark.parametrize("variant", ["rope_dynamic", "mistral_sliding", "llama_bias"])
def test_tokens_decoded_one_by_one_have_the_logits_of_one_long_prefill(variant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tmp_path, golden_config(variant)))
    golden = np.load(GOLDEN / variant / "logits.npz")
    token_ids, positions = golden["160.token_ids"], golden["160.positions"]
    logits = forward(checkpoint.config, load_all(checkpoint), token_ids, positions, decode=56)
    np.testing.assert_allclose(logits, golden["160.logits"], rtol=0, atol=TOLERANCE)


# `dynamic` and the yarn variants with weights of their own have no spelling in GGUF.
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("rope_dynamic", "rope_yarn_mscale")])
def test_three_formats_of_the_same_weights_agree(variant: str, tmp_path: Path) -> None:
    config = golden_config(variant)
    hf = open_checkpoint(write_hf(tmp_path / "hf", config))
    params = load_all(hf)
    save_orbax(tmp_path / "orbax", hf.config, params)
    orbax = open_checkpoint(tmp_path / "orbax")
    assert orbax.config == hf.config
    metadata = llama_metadata(config)
    if variant == "rope_yarn_attention_factor":  # llama.cpp's factor multiplies the paper's
        metadata["llama.rope.scaling.attn_factor"] = hf.config.rope.attention_factor / (0.1 * np.log(4.0).item() + 1)
    extra = {"rope_freqs.weight": llama3_divisors(hf.config)} if variant == "rope_llama3" else None
    gguf = open_checkpoint(write_gguf(tmp_path / "model.gguf", config, metadata=metadata, extra=extra))
    if variant not in ("rope_llama3", "rope_yarn_attention_factor"):
        assert dataclasses.replace(gguf.config, architecture=hf.config.architecture) == hf.config
    golden = np.load(GOLDEN / variant / "logits.npz")
    token_ids, positions = golden["160.token_ids"], golden["160.positions"]
    reference = forward(hf.config, params, token_ids, positions)
    for other in (gguf, orbax):
        assert other.names() == hf.names() == expected_params(other.config).keys()
        logits = forward(other.config, load_all(other), token_ids, positions)
        np.testing.assert_allclose(logits, reference, rtol=0, atol=1e-4)


def llama3_divisors(config: ModelConfig) -> np.ndarray:
    """What llama.cpp's converter stores: plain frequencies over scaled ones, read off the angle of position 1."""
    one = jnp.ones(1, jnp.int32)
    sines = [rope_tables(rope, config.head_dim, one, one)[1][0] for rope in (RopeConfig(), config.rope)]
    plain, scaled = np.arcsin(np.asarray(sines, np.float64))
    return (plain / scaled).astype(np.float32)


@pytest.fixture(scope="module")
def embedded() -> tuple[ModelConfig, dict[str, jax.Array]]:
    checkpoint = open_checkpoint(resolve_model("smollm2-135m"))
    return checkpoint.config, load_all(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["capital", "code", "squares"])
def test_embedded_model_matches_transformers(prompt: str, embedded: tuple[ModelConfig, dict[str, jax.Array]]) -> None:
    golden = {key.partition(".")[2]: value for key, value in np.load(GOLDEN / "smollm2.npz").items() if prompt in key}
    logits = forward(*embedded, golden["token_ids"], golden["positions"], optimize=True)
    found = np.take_along_axis(logits, golden["top_ids"], axis=-1)
    np.testing.assert_allclose(found, golden["top_logits"], rtol=0, atol=TOLERANCE)
    logsumexp = np.log(np.exp(logits.astype(np.float64)).sum(-1))  # over all ids: no other may have grown
    np.testing.assert_allclose(logsumexp, golden["logsumexp"], rtol=0, atol=TOLERANCE)
    assert (logits.argmax(-1) == golden["top_ids"][:, 0]).all()


@pytest.mark.slow
def test_embedded_model_has_the_same_logits_from_all_three_formats(
    embedded: tuple[ModelConfig, dict[str, jax.Array]], tmp_path: Path
) -> None:
    config, params = embedded
    save_orbax(tmp_path / "orbax", config, params)
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    prefix = {name: name if name.startswith("lm_head") else f"model.{name}" for name in params}
    write_hf(tmp_path / "hf", hf_config, {prefix[name]: np.asarray(param) for name, param in params.items()})
    golden = np.load(GOLDEN / "smollm2.npz")
    token_ids, positions = golden["capital.token_ids"], golden["capital.positions"]
    reference = forward(config, params, token_ids, positions, optimize=True)
    for folder in ("orbax", "hf"):
        checkpoint = open_checkpoint(tmp_path / folder)
        assert checkpoint.config == config
        logits = forward(checkpoint.config, load_all(checkpoint), token_ids, positions, optimize=True)
        np.testing.assert_allclose(logits, reference, rtol=0, atol=1e-4)
