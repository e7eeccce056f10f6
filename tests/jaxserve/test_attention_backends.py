"""The engine with each attention kernel, simulated: its tokens are those of XLA's path."""

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu
from tiny_engine import build_tiny_engine, drain, tokens_of

from jaxserve.request import SamplingParams
from pallas_kernels.paged_attention import BackendName

PROMPTS = {"long": [(7 * i) % 150 for i in range(21)], "short": [5, 9, 3]}  # two blocks and a part of one page


def generate(backend: BackendName) -> dict[str, list[int]]:
    engine = build_tiny_engine(
        attention_backend=backend,
        cache_dtype="bfloat16",
        max_num_seqs=2,
        page_size=16,
        num_pages=5,
        max_model_len=32,
        decode_buckets=(2,),
        prefill_buckets=(1,),
    )
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    return {name: tokens_of(outputs) for name, outputs in drain(engine).items()}


cannot_simulate_mosaic = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "InterpretGPUParams"), reason=f"jax {jax.__version__} cannot simulate Mosaic GPU"
)


@pytest.mark.parametrize(
    "backend", [pytest.param("gpu_mosaic", marks=[pytest.mark.slow, cannot_simulate_mosaic]), "gpu_triton"]
)
def test_tokens_with_a_simulated_kernel_are_those_of_xla(backend: BackendName) -> None:
    expected = generate("xla")
    assert {name: len(tokens) for name, tokens in expected.items()} == {"long": 4, "short": 4}
    assert generate(backend) == expected


@pytest.mark.parametrize("backend", ["tpu", "cpu"])
def test_tokens_with_the_tpu_kernel_simulated_and_the_cpus_are_those_of_xla(backend: BackendName) -> None:
    assert generate(backend) == generate("xla")
