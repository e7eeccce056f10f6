"""The table of what the compilers said: Markdown from records; compiles nothing."""

import importlib.metadata
from collections.abc import Iterable, Sequence

from benchmarks.aot.bar import bar
from benchmarks.aot.program import VERSIONED, Record
from benchmarks.aot.tables import mega, ratio, table
from benchmarks.aot.targets import TARGETS
from jaxserve.aot.topologies import accelerator

HEAD = """# What the compilers say

Written by `scripts/aot`: every kernel, and whole steps, compiled for machines that are not there. Nothing here ran.
Seconds are the compiler's, under whatever load the machine had that ran it; the rest is exact.

{versions}

- *bytes*: what XLA's cost analysis counts; for a kernel that is its `CostEstimate`, of full block tables. *least*: the
  visible keys and values once, the queries, the output. (A TPU kernel's estimate is what it copies in the simulator,
  to the byte: `tests/pallas_kernels/test_paged_attention_tpu.py`.) For a step: every weight once (of the embedding
  nothing) and every page once. XLA counts what it moves from HBM to VMEM ahead of its use twice, as a copy and as an
  operand, and of a branch the dearest side. For a GPU that is not there it counts nothing: `gpu_bytes.py` does, from
  the same program, and takes of a branch the cheapest side: nobody asks for more than the likeliest token.
  A write of a narrow page on TPU is counted as if every token had a tile of its own, as decode rows have.
- *spills*: vector registers (TPU) or bytes (GPU) stored for want of registers. Must be 0.
- *bundles*: VLIW instructions of a TPU kernel, rare paths included.
- *between devices*: what collectives leave on each device, of those in a branch or a loop once.
- *temp*: HBM that a program takes beside its arguments.
- *layers*: 64 decode rows of 2k tokens through all layers, the head and an argmax: layers one after another, as the
  engine has them, against one layer in a loop over stacked weights (`layers.py`). *executable*: serialized.
- *weights*: 64 decode rows of 1k tokens through 4 layers whose matrices are kept in that format (`weights.py`); the
  least is every code and scale once, and every page. On TPU *bytes* are those in HBM alone (`tpu_bytes.py`), and empty
  where a loop moves them: int4's groups, of which no temporary is in HBM either.
"""


def write_report(records: Sequence[Record]) -> str:
    versions = ", ".join(f"{name} {version}" for name in VERSIONED if (version := _version(name)))
    parts = [HEAD.format(versions=versions), *bar(records)]
    for name in TARGETS:
        of_target = [record for record in records if record["target"] == name]
        if not of_target:
            continue
        gib = accelerator(TARGETS[name].topology).hbm_bytes / 2**30
        parts += [f"## {name} ({TARGETS[name].topology}, {gib:.0f} GiB a device)\n"]
        reports = {
            (record["name"], record["backend"]): record
            for record in of_target
            if record["what"] == "reports" and "backend" in record and "error" not in record
        }
        kernels = [record for record in of_target if record["what"] == "kernels" and "backend" in record]
        parts += _kernel_table([reports.get((record["name"], record["backend"]), {}) | record for record in kernels])
        steps = [record for record in of_target if record["what"] == "steps"]
        parts += _step_table(steps, gib) + _collective_table(steps)
        parts += _layer_table([record for record in of_target if record["what"] == "layers"])
        parts += _weight_table([record for record in of_target if record["what"] == "weights"])
        parts += _not_compiled(of_target)
    return "\n".join(parts)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernel_table(records: Iterable[Record]) -> list[str]:
    rows = [
        (
            record["name"],
            record["backend"],
            f"{record['seconds']:.1f}",
            _chip_memory(record),
            record.get("registers", record.get("bundles", "")),
            record.get("spills", ""),
            mega(record.get("temp_bytes")),
            mega(record.get("bytes")),
            ratio(record),
        )
        for record in records
        if "seconds" in record
    ]
    head = (
        "kernel",
        "backend",
        "compile s",
        "on chip kB",
        "bundles or registers",
        "spills",
        "temp MB",
        "bytes MB",
        "/ least",
    )
    return table(head, rows)


def _step_table(records: Iterable[Record], gib: float) -> list[str]:
    rows = [
        (
            record["name"],
            record["backend"],
            record["tensor"],
            f"{record['seconds']:.0f}",
            f"{record['argument_bytes'] / 2**30:.2f} + {record['temp_bytes'] / 2**30:.2f} of {gib:.0f}",
            mega(record["code_bytes"]),
            mega(record["bytes"]),
            ratio(record),
            f"{sum(c['count'] * c['result_bytes'] for c in record['collectives']) / 1e6:,.1f}",
        )
        for record in records
        if "seconds" in record
    ]
    head = (
        "Llama-3-8B step",
        "backend",
        "devices",
        "compile s",
        "arguments + temp GiB",
        "code MB",
        "bytes MB",
        "/ least",
        "between devices MB",
    )
    return table(head, rows)


def _layer_table(records: Iterable[Record]) -> list[str]:
    rows = [
        (
            record["name"],
            record["backend"],
            f"{record['seconds']:.0f}",
            mega(record["executable_bytes"]),
            mega(record["temp_bytes"]),
            mega(record["bytes"]),
            ratio(record),
        )
        for record in records
        if "seconds" in record
    ]
    head = ("Llama-3-8B's layers", "backend", "compile s", "executable MB", "temp MB", "bytes MB", "/ least")
    return table(head, rows)


def _weight_table(records: Iterable[Record]) -> list[str]:
    rows = [
        (
            record["name"],
            record["backend"],
            f"{record['seconds']:.0f}",
            mega(record["argument_bytes"]),
            mega(record["temp_bytes"]),
            mega(record["bytes"]),
            ratio(record),
        )
        for record in map(_in_hbm, records)
        if "seconds" in record
    ]
    head = ("weights of 4 layers", "backend", "compile s", "arguments MB", "temp MB", "bytes MB", "/ least")
    return table(head, rows)


def _in_hbm(record: Record) -> Record:
    is_tpu = record.get("backend") == "tpu"
    return record | {"bytes": record["hbm_bytes"]} if is_tpu and "hbm_bytes" in record else record


def _collective_table(records: Iterable[Record]) -> list[str]:
    """What travels between the devices, of each step with its kernels' backend; the largest first."""
    rows = []
    seen = set()
    for record in records:
        if not record.get("collectives") or record["name"] in seen:  # one device has none
            continue
        seen.add(record["name"])
        for c in sorted(record["collectives"], key=lambda c: -c["count"] * c["result_bytes"]):
            total = c["count"] * c["result_bytes"]
            rows.append((record["name"], c["kind"], c["result"], c["count"], f"{total / 1e6:,.3f}", _purpose(c)))
    return table(("Llama-3-8B step", "collective", "result", "count", "MB", "for"), rows)


def _purpose(collective: Record) -> str:
    """The part of the step that a collective belongs to, from jax's name of the operation."""
    name = collective["op_name"]
    if "_run_layer" in name or name.endswith("])/gather"):
        return "the embedding, and each layer's attention and MLP"
    return "the sampler: " + name.rpartition("/")[2]


def _not_compiled(records: Iterable[Record]) -> list[str]:
    lines = []
    for record in records:
        for why in ("error", "skipped"):
            if why in record:
                reason = " ".join(record[why].split())[:300]
                lines.append(f"- {why}: {record['name']}, {record.get('backend', record['what'])}: {reason}")
    return [*lines, ""] if lines else []


def _chip_memory(record: Record) -> str:
    if "vmem_bytes" in record:
        return f"VMEM {record['vmem_bytes'] // 1024}, SMEM {record['smem_bytes'] // 1024}"
    return f"shared {record['shared_bytes'] // 1024}" if "shared_bytes" in record else ""
