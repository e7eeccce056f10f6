"""Runs the compilers for each target in processes of their own, keeps what they say in aot.jsonl, writes aot.md of it.

usage: python -m benchmarks.aot [TARGET ...]      (all targets; those named only, beside what aot.jsonl has of others)
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.aot import gpu, llo
from benchmarks.aot.report import write_report
from benchmarks.aot.targets import TARGETS, Target
from jaxserve.aot.topologies import accelerator

FOLDER = Path(__file__).parent.parent
RECORDS, REPORT = FOLDER / "aot.jsonl", FOLDER / "aot.md"

Record = dict[str, Any]


def run(target: Target, what: str, dump: Path | None = None) -> list[Record]:
    """The records of one process; one that dies leaves those that it printed, and a record that says so."""
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if dump is not None:
        on_tpu = accelerator(target.topology).platform == "tpu"
        environment |= {"LIBTPU_INIT_ARGS": f"{llo.DUMP_FLAGS}{dump}"} if on_tpu else gpu.dump_environment(dump)
    command = [sys.executable, "-m", "benchmarks.aot.compile", target.kind, what, *([str(dump)] if dump else [])]
    records = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("{"):
                records.append(json.loads(line))
                print(line, end="", flush=True)
        errors = process.stderr.read()
    if process.returncode:
        records.append({"target": target.kind, "what": what, "name": "process", "error": errors[-600:]})
        print(records[-1], flush=True)
    return [{"what": what} | record for record in records]


def measure(target: Target) -> list[Record]:
    """Kernels twice: once for seconds, once with the compiler's own reports, from which only those are taken."""
    kernels = run(target, "kernels")
    with tempfile.TemporaryDirectory() as folder:
        reported = run(target, "kernels", Path(folder))
    details = {(record["name"], record.get("backend")): record for record in reported}
    timed = ("seconds", "temp_bytes", "bytes")
    for record in kernels:
        detail = details.get((record["name"], record.get("backend")), {})
        record |= {key: value for key, value in detail.items() if key not in timed}
    return kernels + run(target, "steps")


def main(names: list[str]) -> None:
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    for name in names or TARGETS:
        fresh = measure(TARGETS[name])
        records = [record for record in records if record["target"] != name] + fresh
        RECORDS.write_text("".join(json.dumps(record) + "\n" for record in records))
        REPORT.write_text(write_report(records))


if __name__ == "__main__":
    main(sys.argv[1:])
