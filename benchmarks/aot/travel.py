"""What travels between the devices in a step of Llama-3.1-8B on a mesh, as Markdown; compiled, not run.

usage: python -m benchmarks.aot.travel [TOPOLOGY TENSOR]...     (default: v5e:2x4 8 v6e:2x4 8)

Two steps a machine, 64 decode rows alone and beside 512 tokens of prompts. About a minute a step on two idle cores.
"""

import sys
from pathlib import Path

import jax

from jaxserve.aot.collectives import Collective
from jaxserve.aot.fit import Fit, measure_fit
from jaxserve.aot.topologies import absent_devices, accelerator
from jaxserve.config import EngineConfig, ExecutionSection, MeshSection, ModelSection, SchedulerSection
from models.checkpoint import read_model_config

MODEL = Path("configs/models/llama-3.1-8b")
ROWS, BLOCKS, BLOCK_Q = 64, 8, 64


def main(arguments: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    print("| machine | step | collective | each | count | bytes | for |\n|---|---|---|---|--:|--:|---|")
    for topology, tensor in zip(arguments[::2], arguments[1::2], strict=True):
        fit = fit_on(topology, int(tensor))
        for program in fit.programs:
            assert program.refusal is None, program.refusal
            for c in sorted(program.collectives, key=lambda c: -c.count * c.result_bytes):
                total = c.count * c.result_bytes
                print(
                    f"| {topology} | {program.shape} | {c.kind} | {c.result} | {c.count} | {total:,} | {purpose(c)} |",
                    flush=True,
                )


def fit_on(topology: str, tensor: int) -> Fit:
    config = EngineConfig(
        model=ModelSection(path=str(MODEL), dtype="bfloat16", max_model_len=8192),
        scheduler=SchedulerSection(max_num_seqs=ROWS, max_num_batched_tokens=ROWS + BLOCKS * BLOCK_Q),
        execution=ExecutionSection(block_q=BLOCK_Q, decode_buckets=(ROWS,), prefill_buckets=(BLOCKS,)),
        mesh=MeshSection(tensor=tensor),
    )
    usable_bytes = accelerator(topology).usable_bytes
    return measure_fit(config, read_model_config(MODEL), absent_devices(topology), usable_bytes=usable_bytes)


def purpose(collective: Collective) -> str:
    """The part of the step that a collective belongs to, from jax's name of the operation."""
    name = collective.op_name
    if "_run_layer" in name or name.endswith("])/gather"):
        return "the embedding, and each layer's attention and MLP"
    return "sampler: " + name.rpartition("/")[2]


if __name__ == "__main__":
    main(sys.argv[1:] or ["v5e:2x4", "8", "v6e:2x4", "8"])
