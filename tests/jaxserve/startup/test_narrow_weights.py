"""An engine whose weights are quantized at its start, or were before, answers as the widened weights would."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_engine import EOS, NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, build_tiny_engine, drain, tiny_config, tiny_weights

from jaxserve.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.startup.loading import load_engine
from models.checkpoint import open_checkpoint, save_orbax
from models.config import Quantization, WeightFormat
from models.quantization import QuantizedMatrix, dequantize
from models.registry import module_for, parameter_structs

pytestmark = pytest.mark.usefixtures("compiled_quickly")

GROUP_SIZE = 16
# Groups of 16 are XLA's on a CPU: it multiplies int8 with activations of two digits, and widens the others.
MOST_DIFFERENCE: dict[WeightFormat, float] = {"int8": 0.02, "int4": 1e-3, "fp8_e4m3": 1e-3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    vocab_size: int = NUM_TOKEN_IDS
    eos_token_ids: tuple[int, ...] = (EOS,)


def load(
    path: Path, quantization: WeightFormat | Literal["auto"], matmul: Literal["auto", "cpu", "xla"] = "auto"
) -> Engine:
    config = tiny_config(
        TinyOptions(max_num_seqs=2, max_num_batched_tokens=20, decode_buckets=(2,), prefill_buckets=(1,))
    )
    model = config.model.model_copy(
        update={"path": str(path), "quantization": quantization, "quantization_group_size": GROUP_SIZE}
    )
    execution = config.execution.model_copy(update={"matmul_backend": matmul})
    return load_engine(config.model_copy(update={"model": model, "execution": execution}), Vocabulary())


def answers(engine: Engine) -> tuple[list[int], list[float]]:
    engine.add("a", [5, 1, 77, 30, 8, 9], SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True))
    outputs = drain(engine)["a"]
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    return [token for output in outputs for token in output.token_ids], [entry.logprob for entry in entries]


@pytest.mark.parametrize("format", ["int8", "int4", "fp8_e4m3"])
def test_an_engine_with_narrow_weights_answers_as_with_the_widened(tmp_path: Path, format: WeightFormat) -> None:
    quantization = Quantization.made_at_load(format, group_size=GROUP_SIZE, embeddings=False)
    narrow_model = dataclasses.replace(TINY_MODEL, quantization=quantization)
    save_orbax(tmp_path / "wide", TINY_MODEL, {name: jnp.asarray(array) for name, array in tiny_weights().items()})
    narrow = open_checkpoint(tmp_path / "wide").load(parameter_structs(narrow_model, jnp.dtype(jnp.float32)))
    save_orbax(tmp_path / "narrow", narrow_model, narrow)

    def widened(name: str) -> jnp.ndarray:
        stem = name.removesuffix("weight")
        if f"{stem}scales" not in narrow:
            return narrow[name]
        matrix = QuantizedMatrix(codes=narrow[name], scales=narrow[f"{stem}scales"], zeros=narrow.get(f"{stem}zeros"))
        return dequantize(matrix, jnp.float32)

    structs = nnx.to_flat_state(nnx.state(module_for(TINY_MODEL)(TINY_MODEL, jnp.dtype("float32"))))
    wide = nnx.from_flat_state([(path, param.replace(widened(".".join(map(str, path))))) for path, param in structs])
    tokens, logprobs = answers(build_tiny_engine(params=wide))
    for engine in (load(tmp_path / "wide", format), load(tmp_path / "narrow", "auto")):
        found, their_logprobs = answers(engine)
        assert found == tokens
        assert their_logprobs == pytest.approx(logprobs, abs=MOST_DIFFERENCE[format])


def test_the_cpus_kernel_answers_as_xla_does(tmp_path: Path) -> None:
    """The head and the embedding are narrow too. XLA leaves activations as they are, the kernel rounds them."""
    model = dataclasses.replace(
        TINY_MODEL,
        intermediate_size=64,
        quantization=Quantization.made_at_load("int4", group_size=32, embeddings=True),
    )
    wide = dataclasses.replace(model, quantization=None)
    rng = np.random.default_rng(0)
    structs = parameter_structs(wide, jnp.dtype(jnp.float32))
    save_orbax(
        tmp_path / "wide",
        wide,
        {name: jnp.asarray(rng.normal(size=s.shape) * 0.2, jnp.float32) for name, s in structs.items()},
    )
    narrow = open_checkpoint(tmp_path / "wide").load(parameter_structs(model, jnp.dtype(jnp.float32)))
    save_orbax(tmp_path / "narrow", model, narrow)
    found = {}
    for backend in ("cpu", "xla"):
        engine = load(tmp_path / "narrow", "auto", backend)
        assert engine.config.execution.matmul_backend == backend
        found[backend] = answers(engine)
    assert found["cpu"][0] == found["xla"][0]
    assert found["cpu"][1] == pytest.approx(found["xla"][1], abs=0.02)
    assert found["cpu"][1] != found["xla"][1]
