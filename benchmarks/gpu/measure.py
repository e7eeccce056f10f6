"""Checks the kernels on an NVIDIA GPU, case by case, and times decode attention against what its memory allows.

usage: see benchmarks/gpu/run

A time is that of one call among several in one dispatch and many dispatches in a row, over so many pages that the cache
does not hold them between two calls. Every number is set against the read bandwidth measured in the same run.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import CASES, QUANTIZED_CASES, TOLERANCE, AttentionCase, kv_pages, make_inputs, reference, rounded
from jax import Array
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as jax_paged_attention

from benchmarks.gpu import matmul
from pallas_kernels.kv_dtype import KVDtype, is_quantized, token_bytes
from pallas_kernels.kv_format import KVPages, pack, quantize
from pallas_kernels.paged_attention import AttentionRows, Backend, BackendName, choose_backend, paged_attention
from pallas_kernels.paged_attention.shape import AttentionShape

KERNELS: tuple[BackendName, ...] = ("gpu_mosaic", "gpu_triton")
CACHE_BYTES = 256 << 20  # several times the last-level cache of any GPU
DEVICE_TOLERANCE = TOLERANCE | {"float32": 1e-4}  # exponentials are the hardware's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured. The defaults are one layer of Llama-3-8B."""

    sequences: tuple[int, ...] = (1, 16, 64, 256)
    keys: tuple[int, ...] = (512, 4096, 32768)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    bandwidth_bytes: int = 8 << 30
    seconds_each: float = 0.3
    calls: int = 16  # in a dispatch: a loop of known length, which the device runs without asking the host
    narrow: tuple[KVDtype, ...] = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
    narrow_sizes: tuple[tuple[int, int], ...] = ((64, 4096), (16, 32768))  # sequences and keys that these are timed at
    cases: tuple[AttentionCase, ...] = (*CASES, *QUANTIZED_CASES)
    products: matmul.Plan = matmul.LLAMA_3_8B


DRY = Plan(
    sequences=(1, 2),
    keys=(32, 64),
    heads=4,
    kv_heads=2,
    head_dim=64,
    bandwidth_bytes=1 << 20,
    seconds_each=0.0,
    calls=2,
    narrow=("int8",),
    narrow_sizes=((2, 64),),
    cases=tuple(
        case for case in (*CASES, *QUANTIZED_CASES) if case.name in ("gqa", "gqa_int8", "prefill_cap_sinks_window")
    ),
    products=matmul.DRY,
)


def backend_for(
    name: BackendName, plan: Plan, dtype: KVDtype = "bfloat16", kv_dtype: KVDtype = "bfloat16", **changes: int
) -> Backend | str:
    """The backend on this device, simulated where it must be; or why it cannot be."""
    device = jax.devices()[0]
    shape = AttentionShape(
        heads=plan.heads,
        kv_heads=changes.get("kv_heads", plan.kv_heads),
        head_dim=changes.get("head_dim", plan.head_dim),
        page_size=changes.get("page_size", plan.page_size),
        block_q=64,
        dtype=dtype,
        kv_dtype=kv_dtype,
        platform=device.platform,
        compute_capability=float(getattr(device, "compute_capability", 0)),
    )
    try:
        return choose_backend(name, shape)
    except ValueError as reason:
        return str(reason)


def check_case(case: AttentionCase, name: BackendName, plan: Plan) -> tuple[str, bool]:
    """A row of the table of numerics, and whether it is as it should be."""
    if name == "gpu_mosaic":
        case = dataclasses.replace(case, dtype="bfloat16")  # its only precision in the table
    backend = backend_for(
        name,
        plan,
        case.dtype,
        case.cache_dtype,
        head_dim=case.head_dim,
        kv_heads=case.kv_heads,
        page_size=case.page_size,
    )
    if isinstance(backend, str):
        return f"| {case.name} | {name} | {case.dtype} | – | {backend} |", True
    inputs = make_inputs(case)
    out = jax.jit(paged_attention, static_argnames=("scale", "sliding_window", "soft_cap", "backend"))(
        jnp.asarray(inputs.q, case.dtype),
        kv_pages(inputs, case.cache_dtype),
        inputs.block_tables,
        AttentionRows(tables=inputs.tables, starts=inputs.starts, lengths=inputs.lengths),
        scale=inputs.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
        backend=backend,
    )
    expected = reference(case, rounded(case, inputs))
    error = np.abs(np.asarray(out, np.float64) - expected)[~np.isnan(expected)].max(initial=0.0)
    good = bool(error <= DEVICE_TOLERANCE[case.dtype])  # false for NaN too
    return f"| {case.name} | {name} | {case.dtype} | {error:.1e} | {'good' if good else '**WRONG**'} |", good


def check_cases(plan: Plan) -> tuple[list[str], bool]:
    jobs = [(case, name) for case in plan.cases for name in KERNELS]
    # Compiling is most of it, and runs beside itself; simulations do not.
    workers = 1 if jax.devices()[0].platform == "cpu" else 8
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(check_case, case, name, plan) for case, name in jobs]
    rows, all_good = [], True
    for (case, name), future in zip(jobs, futures, strict=True):
        if (error := future.exception()) is not None:
            row, good = f"| {case.name} | {name} | | – | **FAILED**: {one_line(error)} |", False
        else:
            row, good = future.result()
        rows.append(row)
        all_good &= good
    return rows, all_good


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:200]


def seconds_per_call(dispatch: Callable[[], Any], plan: Plan, calls: int | None = None) -> float:
    """Of a dispatch that makes so many calls, `plan.calls` by default; the best of three rows of dispatches."""
    jax.block_until_ready(dispatch())
    start = time.perf_counter()
    jax.block_until_ready(dispatch())
    count = max(1, min(500, int(plan.seconds_each / 3 / (time.perf_counter() - start))))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready([dispatch() for _ in range(count)])
        best = min(best, (time.perf_counter() - start) / count)
    return best / (calls or plan.calls)


def bandwidth(plan: Plan) -> float:
    """Bytes a second of reading one large array."""
    array = jnp.zeros((plan.bandwidth_bytes // 4,), jnp.int32)

    @jax.jit
    def read(array: Array) -> Array:
        return jax.lax.fori_loop(0, plan.calls, lambda i, most: jnp.maximum(most, (array ^ i).max()), jnp.int32(0))

    return plan.bandwidth_bytes / seconds_per_call(lambda: read(array), plan)


def time_engine(backend: Backend, plan: Plan, sequences: int, keys: int, kv: KVPages, tables: Array) -> float:
    """Decode attention of one layer. Tables are as wide as the longest sequences, whatever is used of them."""
    rows = AttentionRows(
        tables=jnp.arange(sequences),
        starts=jnp.full((sequences,), keys - 1),
        lengths=jnp.full((sequences,), keys),
    )

    def calls(q: Array, kv: KVPages, tables: Array, rows: AttentionRows) -> Array:
        def call(i: Array, q: Array) -> Array:
            own = tables[i % tables.shape[0]]
            return paged_attention(q, kv, own, rows, scale=plan.head_dim**-0.5, backend=backend)

        return jax.lax.fori_loop(0, plan.calls, call, q)

    compiled = _jitted(calls, (backend, sequences, tables.shape, kv.dtype))
    q = jnp.ones((sequences, 1, plan.heads, plan.head_dim), jnp.bfloat16)
    return seconds_per_call(lambda: compiled(q, kv, tables, rows), plan)


def time_jax(plan: Plan, sequences: int, keys: int, kv_pages: Array, tables: Array) -> float:
    """jax's own kernel, with tables that just hold the sequences and as many splits as they allow, up to 16."""
    pages_per_seq = keys // plan.page_size
    splits = min(16, pages_per_seq)
    tables = tables[:, :, :pages_per_seq]
    lengths = jnp.full((sequences,), keys)
    k_pages, v_pages = (jnp.copy(half.swapaxes(0, 1)) for half in jnp.split(kv_pages, 2, axis=-1))

    def calls(q: Array, k_pages: Array, v_pages: Array, tables: Array) -> Array:
        def call(i: Array, q: Array) -> Array:
            out = jax_paged_attention(
                q,
                k_pages,
                v_pages,
                tables[i % tables.shape[0]],
                lengths,
                k_splits=splits,
                pages_per_compute_block=min(8, pages_per_seq // splits),
                interpret=jax.devices()[0].platform == "cpu",
            )
            return out.astype(q.dtype)

        return jax.lax.fori_loop(0, plan.calls, call, q)

    compiled = jax.jit(calls)
    q = jnp.ones((sequences, plan.heads, plan.head_dim), jnp.bfloat16)
    return seconds_per_call(lambda: compiled(q, k_pages, v_pages, tables), plan)


_COMPILED: dict[Any, Any] = {}


def _jitted(function: Callable[..., Any], key: Any) -> Any:
    """One jitted function a backend and shape: lengths are data, so all of them share it."""
    return _COMPILED.setdefault(key, jax.jit(function))


def make_pool(plan: Plan, sequences: int, keys: int, dtype: KVDtype) -> tuple[KVPages, Array] | str:
    """Pages and block tables, in turn, that the cache does not hold together; or why they are left out."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 30)
    needed = sequences * keys // plan.page_size
    page_bytes = plan.page_size * token_bytes(plan.kv_heads, plan.head_dim, dtype)
    tables_in_turn = max(1, min(64, -(-CACHE_BYTES // (needed * page_bytes))))
    num_pages = 1 + tables_in_turn * needed
    if num_pages * page_bytes * 2.2 > memory:  # jax's own kernel needs a copy
        return f"left out: {num_pages * page_bytes / 1e9:.0f} GB of pages"
    shape = (plan.kv_heads, plan.page_size, plan.head_dim)
    k, v = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (0, 1))

    def pages(pattern: Array) -> Array:
        return jnp.tile(pattern, (num_pages, 1, 1, 1))

    if is_quantized(dtype):
        (k_codes, k_scales), (v_codes, v_scales) = quantize(k, dtype), quantize(v, dtype)
        scales = pages(jnp.stack([k_scales, v_scales], axis=1))
        kv = KVPages(data=pages(pack(k_codes, v_codes, dtype)), scales=scales, dtype=dtype)
    else:
        kv = KVPages(data=pages(jnp.concatenate([k, v], axis=-1)), scales=None, dtype=dtype)
    ids = 1 + np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32)
    tables = np.zeros((tables_in_turn, sequences, max(plan.keys) // plan.page_size), np.int32)
    tables[:, :, : keys // plan.page_size] = ids.reshape(tables_in_turn, sequences, -1)
    return kv, jnp.asarray(tables)


def time_decode(
    plan: Plan, sequences: int, keys: int, dtype: KVDtype, read_bytes_per_s: float, deadline: float
) -> list[str]:
    """The cells of one row: the limit, then each kernel's time; jax's own and XLA's only for bfloat16."""
    pool = make_pool(plan, sequences, keys, dtype)
    if isinstance(pool, str):
        return [pool]
    kv, tables = pool
    least = sequences * keys * token_bytes(plan.kv_heads, plan.head_dim, dtype) / read_bytes_per_s
    cells = [f"{least * 1e6:.1f}"]
    for name in KERNELS if is_quantized(dtype) else (*KERNELS, "xla", "jax"):
        if time.monotonic() > deadline:
            cells.append("no time left")
            continue
        try:
            if name == "jax":
                seconds = time_jax(plan, sequences, keys, kv.data, tables)
            else:
                backend = backend_for(name, plan, kv_dtype=dtype)
                if isinstance(backend, str):
                    cells.append(backend)
                    continue
                seconds = time_engine(backend, plan, sequences, keys, kv, tables)
            cells.append(f"{seconds * 1e6:.1f} ({least / seconds:.0%})")
        except Exception as error:  # a kernel that fails is a cell of the table, and the others go on
            cells.append(one_line(error))
    return cells


def time_all(plan: Plan, read_bytes_per_s: float, deadline: float) -> tuple[list[str], list[str]]:
    """The rows of the two tables: bfloat16 at every size, narrow formats at a few."""
    tables: tuple[list[str], list[str]] = ([], [])
    for sequences, keys in itertools.product(plan.sequences, plan.keys):
        cells = time_decode(plan, sequences, keys, "bfloat16", read_bytes_per_s, deadline)
        tables[0].append(f"| {sequences} | {keys} | {' | '.join(cells)} |")
        print(tables[0][-1], flush=True)
    for dtype, (sequences, keys) in itertools.product(plan.narrow, plan.narrow_sizes):
        cells = time_decode(plan, sequences, keys, dtype, read_bytes_per_s, deadline)
        tables[1].append(f"| {dtype} | {sequences} | {keys} | {' | '.join(cells)} |")
        print(tables[1][-1], flush=True)
    return tables


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run")
    parser.add_argument("--dry", action="store_true", help="the same code, tiny and simulated")
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu.md; a dry run prints only")
    parser.add_argument("--budget-s", type=float, default=450.0, help="no measurement starts after so many seconds")
    options = parser.parse_args()
    if options.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    start = time.monotonic()
    plan = DRY if options.dry else Plan()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.dry:
        print(f"no NVIDIA GPU: jax {jax.__version__} found {device.platform}; --dry simulates", file=sys.stderr)
        return 3

    numerics, all_good = check_cases(plan)
    products, products_good = matmul.check()
    numerics, all_good = numerics + products, all_good and products_good
    print(*numerics, sep="\n", flush=True)
    checked_s = time.monotonic() - start
    read_bytes_per_s = bandwidth(plan)
    deadline = start + options.budget_s
    matrix = plan.products
    timer = functools.partial(seconds_per_call, plan=plan)
    products = matmul.time_products(matrix, read_bytes_per_s, timer, deadline)
    times, narrow = time_all(plan, read_bytes_per_s, deadline)
    seconds = time.monotonic() - start
    table = f"""# Kernels on {device.device_kind}

{time.strftime("%Y-%m-%d")}, jax {jax.__version__}, `benchmarks/gpu/run`: {seconds:.0f} s, numerics {checked_s:.0f}.
Reading memory: {read_bytes_per_s / 1e9:.0f} GB/s measured in this run.

## Decode

One layer: {plan.heads} heads, {plan.kv_heads} KV heads, head_dim {plan.head_dim}, pages of {plan.page_size}, bfloat16.
Microseconds a call, and the share of what reading every key and value once would take at that bandwidth.

| sequences | keys | limit | {" | ".join(KERNELS)} | XLA | jax's paged_attention |
| --- | --- | --- | {"--- | " * len(KERNELS)}--- | --- |
{chr(10).join(times)}

Narrow formats, scales included in the limit:

| format | sequences | keys | limit | {" | ".join(KERNELS)} |
| --- | --- | --- | --- | {"--- | " * len(KERNELS)}
{chr(10).join(narrow)}

## Products with a 4-bit matrix

{matrix.outputs} × {matrix.inputs} in groups of {matrix.group} with zero points, bfloat16 activations.
Microseconds a product, and the share of what reading codes, scales and zero points once would take.

{matmul.HEAD}
{chr(10).join(products)}

## Numerics: largest error against float64, with NaN in every key and value that must not be read

| case | kernel | dtype | error | |
| --- | --- | --- | --- | --- |
{chr(10).join(numerics)}
"""
    if options.dry:
        print(table)
    else:
        (options.out or Path("benchmarks/gpu.md")).write_text(table)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
