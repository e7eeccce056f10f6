"""A few of Llama-3-8B's layers with weights of each format: whether the compilers keep them narrow until the dot."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.aot.layers import measured, unrolled
from benchmarks.aot.program import Program, Record, key_of
from benchmarks.aot.steps import LLAMA_3_8B, SOURCES, spec_for
from benchmarks.aot.targets import Target
from models.config import Quantization, WeightFormat
from pallas_kernels.paged_attention import Backend, BackendName

COMPARED = ("v5e", "v6e", "h200", "a100", "b200")
FORMATS: tuple[WeightFormat | None, ...] = (None, "int8", "fp8_e4m3", "int4")
LAYERS = 4
GROUP_SIZE = 32  # the default
VOCAB = 1024  # the head is no quantized matrix: a small one leaves the layers to be seen


def weights(target: Target) -> Iterator[Program]:
    """64 decode rows of 1k tokens through the layers, one program for each format of the weights."""
    if target.kind not in COMPARED:
        return
    backend = target.backends[0]
    sources = (
        *SOURCES,
        "models/quantization.py",
        "pallas_kernels/quantized_matmul/gpu*.py",
        *(f"benchmarks/aot/{name}.py" for name in ("layers", "weights")),
    )
    for format in FORMATS:
        yield Program(
            labels={"name": format or "bfloat16", "backend": backend},
            key=key_of((target.topology, format), backend, *sources),
            measure=partial(_with_format, target, backend, format),
        )


def _with_format(target: Target, backend: BackendName, format: WeightFormat | None) -> Record:
    quantization = None
    if format is not None:
        quantization = Quantization.made_at_load(format, group_size=GROUP_SIZE, embeddings=False)
    changes = {"num_layers": LAYERS, "vocab_size": VOCAB, "eos_token_ids": (1,)}
    model = replace(LLAMA_3_8B, **changes, quantization=quantization)
    spec = spec_for(target, 1, Backend(name=backend), model)
    return measured(spec, *unrolled(spec))
