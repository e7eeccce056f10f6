"""Evaluation: its perplexity is that of whole logits, its rows count real bytes, narrower caches are further away."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import HF_CONFIG, forward, load_all, write_hf

from jaxserve.config import EngineConfig, ModelSection
from jaxserve.errors import ConfigError
from jaxserve.evaluation import Setting, evaluate
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from server.cli.evaluate import markdown

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PROSE = Path(__file__).parents[2] / "benchmarks" / "evaluation.txt"
# Of its first 512 tokens by transformers 5.24, in float32 through its own GGUF loader; of all five windows: 23.033028.
TRANSFORMERS_PERPLEXITY = 22.267894


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    vocab_size: int = 90  # of 96 columns
    eos_token_ids: tuple[int, ...] = (2,)


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(model=ModelSection(path=str(path)))


def test_perplexity_is_that_of_the_whole_logits_and_narrower_caches_are_further_away(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model", HF_CONFIG)
    token_ids = np.random.default_rng(0).integers(90, size=150).astype(np.int32)
    checkpoint = open_checkpoint(path)
    params, nll = load_all(checkpoint), 0.0
    windows = [token_ids[:70], token_ids[70:140], token_ids[140:]]
    for window in windows:
        logits = forward(checkpoint.config, params, window, np.arange(len(window))).astype(np.float64)[:, :90]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        nll -= log_p[np.arange(len(window) - 1), window[1:]].sum()
    settings = [Setting(kv_dtype="int8"), Setting(kv_dtype="int4"), Setting(quantization="int8")]
    *rows, narrow = evaluate(config_of(path), Vocabulary(), token_ids.tolist(), settings, window=70)
    assert [row.num_tokens for row in rows] == [147] * 3
    assert rows[0].perplexity == pytest.approx(np.exp(nll / 147), rel=1e-5)
    assert (rows[0].kv_dtype, rows[0].agreement, rows[0].kl) == ("float32", 1.0, pytest.approx(0.0, abs=1e-6))
    assert 0 < rows[1].kl < rows[2].kl / 4  # 127 steps against 7
    # 2 layers, 2 KV heads of width 8, keys and values: codes, and 2 bytes a scale
    assert [row.kv_bytes_per_token for row in rows] == [2 * 2 * 2 * size for size in (32, 8 + 2, 4 + 2)]
    assert [row.pages_per_gib for row in rows] == [2**30 // (16 * row.kv_bytes_per_token) for row in rows]
    assert [row.requests_per_gib for row in rows] == [row.pages_per_gib // 64 for row in rows]
    assert (narrow.quantization, narrow.kv_dtype) == ("int8", "float32")
    assert 0 < narrow.kl < 0.01
    matrices = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32)  # of two layers; a byte each, where it was four
    num_rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert rows[0].weight_bytes - narrow.weight_bytes == 3 * matrices - 4 * num_rows
    assert "| none | int8 |" in markdown(rows)
    json.dumps([dataclasses.asdict(row) for row in rows])


def test_a_text_without_anything_to_predict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the text has 1 tokens"):
        evaluate(config_of(tmp_path), Vocabulary(), [3], [], window=16)


@pytest.mark.slow
def test_the_embedded_models_perplexity_is_what_transformers_finds() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    token_ids = tokenizer.encode(PROSE.read_text(encoding="utf-8"))[:512]
    (row,) = evaluate(EngineConfig(), tokenizer, token_ids, [], window=512)
    assert row.num_tokens == 511
    assert row.perplexity == pytest.approx(TRANSFORMERS_PERPLEXITY, rel=1e-4)
