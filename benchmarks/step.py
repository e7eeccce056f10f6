"""The compiled CPU step against its own limit: the larger of its GEMMs at the machine's measured peak and its bytes
at the measured bandwidth. Prints the table of benchmarks/step.md.

usage: python benchmarks/step.py [--attention xla] [--dtype bfloat16] [--cache-dtype int8] [--seconds 60]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.llm import LLM
from jaxserve.simulation.profiler import profile
from models.config import ModelConfig
from models.registry import parameter_structs
from models.step import KVPool

DECODE_ROWS = (1, 8, 32)
PREFILL_BLOCKS = (4, 16)
CONTEXT = 2048
PAGE_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", default="auto", help="execution.attention_backend")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--cache-dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the table")
    options = parser.parse_args()
    peak, bandwidth = gemm_flops_per_second(options.dtype), bytes_per_second()
    llm = LLM(
        "smollm2-135m",
        model={"max_model_len": CONTEXT + 1, "dtype": options.dtype},
        cache={"dtype": options.cache_dtype, "num_pages": 1 + DECODE_ROWS[-1] * (CONTEXT // PAGE_SIZE + 1)},
        scheduler={"max_num_seqs": DECODE_ROWS[-1], "max_num_batched_tokens": DECODE_ROWS[-1] + 512},
        execution={
            "attention_backend": options.attention,
            "decode_buckets": DECODE_ROWS,
            "prefill_buckets": PREFILL_BLOCKS,
            "compilation_cache": None,
        },
    )
    attention = llm.engine.config.execution.attention_backend
    print(f"jax {jax.__version__}, {options.dtype} weights, {options.cache_dtype} cache, attention by {attention}")
    print(f"GEMM peak {peak / 1e9:.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.1f} GB/s, both as measured just now\n")
    print("| decode rows | prompt tokens | keys | step ms | GEMM limit ms | byte limit ms | times its limit |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    model, block_q = llm.engine.model_config, llm.engine.config.execution.block_q
    assert isinstance(block_q, int)
    weights, per_token, per_sample = costs(model, options.dtype)
    kv_bytes = KVPool.page_bytes(model, 1, options.cache_dtype)
    attention_flops = 4 * model.num_layers * model.num_heads * model.head_dim
    for step in profile(llm.engine, budget_s=options.seconds).times.steps:
        tokens = step.decode_rows + step.prefill_blocks * block_q
        samples = min(DECODE_ROWS[-1], step.decode_rows + step.prefill_blocks)
        # A block's keys serve all its queries: they are read once, and computed with block_q times.
        flops = tokens * per_token + samples * per_sample + step.kv_tokens * attention_flops
        gemm_s = flops / peak
        bytes_s = (weights + step.kv_tokens * kv_bytes) / bandwidth
        print(
            f"| {step.decode_rows} | {step.prefill_blocks * block_q} | {step.kv_tokens} | {step.seconds * 1e3:.1f} "
            f"| {gemm_s * 1e3:.1f} | {bytes_s * 1e3:.1f} | {step.seconds / max(gemm_s, bytes_s):.2f} |"
        )


def costs(model: ModelConfig, dtype: str) -> tuple[int, int, int]:
    """Bytes of all weights; FLOPs of a token in the layers, and of a row in the head."""
    structs = parameter_structs(model, jnp.dtype(dtype))
    weights = sum(struct.size * struct.dtype.itemsize for struct in structs.values())
    layers = sum(struct.size for name, struct in structs.items() if name.startswith("layers.") and struct.ndim == 2)
    return weights, 2 * layers, 2 * model.vocab_size * model.hidden_size


def gemm_flops_per_second(dtype: str) -> float:
    """The best GEMM of this dtype that XLA runs here: a square one that fits the caches' blocking."""
    size = 2048
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    return 2 * size**3 / best_seconds(multiply, a)


def bytes_per_second() -> float:
    """Reading: a sum over 512 MiB, far beyond the caches, by both cores."""
    array = jnp.ones((2, 64 * 2**20), jnp.float32)
    return array.nbytes / best_seconds(jax.jit(lambda x: x.sum(axis=1)), array)


def best_seconds(call: Callable[[jax.Array], jax.Array], array: jax.Array) -> float:
    call(array).block_until_ready()
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        call(array).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(sorted(seconds)[:3])


if __name__ == "__main__":
    main()
