"""Compiles one target's kernels and model steps and prints a JSON line for each.

usage: python -m benchmarks.aot.compile TARGET kernels|reports|steps|layers|weights [DUMP_FOLDER] < KEYS

What has one of the keys is done already: of it a line is printed that has its key alone. One process a target:
kernels remember what they learnt of the device. For `reports` the compiler writes down in a folder what it does, which
takes it ten times as long; so seconds, and all that is not a kernel of ours, come from a process without one.
"""

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.aot import gpu, llo
from benchmarks.aot.gpu_bytes import bytes_moved
from benchmarks.aot.kernels import ATTENTION, MATMULS, WITH_XLA, WRITES, AttentionCall, MatmulCall, WriteCall
from benchmarks.aot.layers import layers
from benchmarks.aot.program import WRITES as WRITE_SOURCES
from benchmarks.aot.program import Program, Record, key_of
from benchmarks.aot.steps import steps
from benchmarks.aot.targets import TARGETS, Target
from benchmarks.aot.weights import weights
from jaxserve.aot.topologies import absent_mesh, accelerator
from pallas_kernels.paged_attention import XLA, Backend, choose_backend

Call = AttentionCall | WriteCall | MatmulCall


def compile_kernel(call: Call, backend: Backend, mesh: Mesh, options: dict[str, str] | None = None) -> Record:
    """Seconds to compile, and XLA's own account of memory and bytes."""
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), call.arguments())
    donated = 0 if isinstance(call, WriteCall) else ()
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # by which a kernel learns its device's kind
        traced = jax.jit(call.function(backend), donate_argnums=donated).trace(*arguments)
        compiled = traced.lower().compile(options)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    return {
        "seconds": time.perf_counter() - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "bytes": cost["bytes accessed"] if on_tpu else bytes_moved(traced.jaxpr.jaxpr, compiled.as_text()),
        "least_bytes": call.least_bytes,
    }


def kernels(target: Target, dump: Path | None) -> Iterator[Program]:
    mesh = absent_mesh(target.topology, {"x": 1})
    found = accelerator(target.topology)
    platform, capability = ("tpu", 0.0) if found.platform == "tpu" else ("gpu", float(found.compute_capability))
    for backend_name in target.backends:
        for call in ATTENTION:
            if backend_name == "xla" and (dump is not None or call.name not in WITH_XLA):
                continue
            try:
                choose_backend(backend_name, call.shape(platform, capability))
            except ValueError as reason:
                if dump is None:
                    yield Program(
                        labels={"name": call.name, "backend": backend_name},
                        key=key_of((target.topology, call), backend_name),
                        measure=partial(dict, skipped=str(reason)),
                    )
                continue
            # By name and not from the choice: the compiler's own platform is this process's, so nothing is simulated.
            yield _program(call, Backend(name=backend_name), mesh, target, dump)
    for write in WRITES:
        by_kernel = platform == "tpu" and write.has_kernel
        if dump is None or by_kernel:
            yield _program(write, Backend(name="tpu") if by_kernel else XLA, mesh, target, dump)
    for matmul in MATMULS if platform == "gpu" else ():
        yield _program(matmul, Backend(name="gpu_triton"), mesh, target, dump)


def _program(call: Call, backend: Backend, mesh: Mesh, target: Target, dump: Path | None) -> Program:
    on_tpu = accelerator(target.topology).platform == "tpu"
    reader = ("gpu_bytes" if dump is None else "gpu") if not on_tpu else "llo"
    sources: tuple[str, ...] = (f"benchmarks/aot/{reader}.py",)
    if isinstance(call, WriteCall):
        sources += WRITE_SOURCES
    if isinstance(call, MatmulCall):
        sources += ("pallas_kernels/quantized_matmul/gpu_triton.py",)
    return Program(
        labels={"name": call.name, "backend": backend.name},
        key=key_of((target.topology, call, dump is None), backend.name, *sources),
        measure=partial(_measured, call, backend, mesh, target, dump),
    )


def _measured(call: Call, backend: Backend, mesh: Mesh, target: Target, dump: Path | None) -> Record:
    try:
        started_ns = time.time_ns()
        # Of the shared memory of Triton's kernels only the passes know; two of the kernels are worth their minutes.
        is_told = dump is not None and backend.name == "gpu_triton" and call.name in WITH_XLA
        record = compile_kernel(call, backend, mesh, gpu.TRITON_PASSES if is_told else None)
        if dump is None:
            return record
        found, name = accelerator(target.topology), call.kernel
        if found.platform == "tpu":
            return llo.kernel_report(dump, name)
        return gpu.kernel_report(dump, started_ns, found.compute_capability, name)
    except Exception as error:  # whatever a compiler may throw is a row of the table
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        if dump is not None:  # hundreds of megabytes a kernel, which the next report would search
            for path in dump.rglob("*"):
                if path.is_file():
                    path.unlink()


def main(target: Target, what: str, dump: Path | None, done: set[str]) -> None:
    parts = {"steps": steps, "layers": layers, "weights": weights}
    for program in parts[what](target) if what in parts else kernels(target, dump):
        record: Record = {"key": program.key}
        if program.key not in done:
            record |= program.labels | program.measure()
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    main(TARGETS[sys.argv[1]], sys.argv[2], folder, set(sys.stdin.read().split()))
