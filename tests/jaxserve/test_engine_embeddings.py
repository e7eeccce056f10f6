"""Embeddings in the engine: the same alone, among others and after a preemption; none compiles, none is output."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny_engine import drain

from jaxserve.compilations import COMPILATIONS
from jaxserve.engine import EMBEDDING_PARAMS, Engine
from jaxserve.pooling import Pooling
from jaxserve.request import SamplingParams

TinyEngine = Callable[..., Engine]

PROMPTS = [[3 + (7 * i + j) % 140 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 70, 150))]


def embed(engine: Engine, pooling: Pooling) -> list[tuple[float, ...]]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(f"embed {i}", prompt, EMBEDDING_PARAMS, pooling=pooling)
    outputs = drain(engine)
    embeddings = []
    for i in range(len(PROMPTS)):
        (output,) = outputs[f"embed {i}"]
        assert output.embedding is not None
        assert (output.token_ids, output.finish_reason) == ((), "stop")
        embeddings.append(output.embedding)
    return embeddings


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_neighbours_and_preemption_change_no_embedding(tiny_engine: TinyEngine, pooling: Pooling) -> None:
    alone = embed(tiny_engine(), pooling)
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1.0, atol=1e-6)
    compilations = COMPILATIONS.total
    # 22 pages of 8 tokens: three that generate grow out of them while the long prompts are computed.
    crowded = tiny_engine(num_pages=1 + 22, max_num_batched_tokens=8 + 16)
    for i in range(3):
        crowded.add(f"short {i}", [3 + i] * 2, SamplingParams(max_tokens=60, ignore_eos=True))
    crowded.step()
    np.testing.assert_allclose(embed(crowded, pooling), alone, atol=1e-5)
    assert crowded.stats().preemptions_total > 0
    assert COMPILATIONS.total == compilations
    crowded.check_integrity()


def test_an_embedding_counts_its_prompt_and_no_output(tiny_engine: TinyEngine) -> None:
    engine = tiny_engine()
    embed(engine, "mean")
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.output_tokens_total) == (sum(map(len, PROMPTS)), 0)
    assert stats.pages_active == 0
