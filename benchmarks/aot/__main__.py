"""Runs the compilers for each target in processes of their own, keeps what they say in aot.jsonl, writes aot.md of it.

usage: python -m benchmarks.aot [TARGET ...]      (all targets; those named only, beside what aot.jsonl has of others)

A target has four parts: its kernels' seconds, the compiler's own reports of them, whole steps, and layers in a
loop. What is done is kept part by part, so a run that was cut short, or lost a part to an error, goes on where it
stood; a part is done again when the source that it compiles has changed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.aot import gpu, llo
from benchmarks.aot.report import VERSIONED, write_report
from benchmarks.aot.targets import TARGETS, Target
from jaxserve.aot.topologies import accelerator

ROOT = Path(__file__).parent.parent.parent
RECORDS, REPORT = ROOT / "benchmarks/aot.jsonl", ROOT / "benchmarks/aot.md"

PARTS = {"kernels": 600, "reports": 1200, "steps": 1200, "layers": 600}  # and the seconds after which each is given up
KERNEL_SOURCES = (
    "pallas_kernels/**/*.py",
    *(f"benchmarks/aot/{name}.py" for name in ("compile", "kernels", "gpu", "gpu_bytes", "llo")),
)
STEP_SOURCES = (
    *KERNEL_SOURCES,
    "benchmarks/aot/steps.py",
    "benchmarks/aot/layers.py",
    "models/**/*.py",
    "jaxserve/**/*.py",
)

Record = dict[str, Any]


def source_of(part: str) -> str:
    """A digest of all that decides what a part's records say: our source and the compilers' versions."""
    digest = hashlib.sha256()
    for pattern in STEP_SOURCES if part in ("steps", "layers") else KERNEL_SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    digest.update(repr([installed.get(name) for name in VERSIONED]).encode())
    return digest.hexdigest()[:16]


def run(target: Target, part: str) -> list[Record]:
    """The records of one process and, last, one of the process itself; if it dies, what it had printed is kept."""
    start = time.monotonic()
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.aot.compile", target.kind, part]
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        if part == "reports":
            dump = Path(folder)
            on_tpu = accelerator(target.topology).platform == "tpu"
            environment |= {"LIBTPU_INIT_ARGS": f"{llo.DUMP_FLAGS}{dump}"} if on_tpu else gpu.dump_environment(dump)
            command.append(folder)
        errors = Path(folder) / "stderr"
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as process,
        ):
            watch = threading.Timer(PARTS[part], process.kill)
            watch.start()
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    records.append(json.loads(line))
                    print(line, end="", flush=True)
            process.wait()
            watch.cancel()
        whole: Record = {"name": "process", "wall_s": time.monotonic() - start}
        if process.returncode:
            whole["error"] = (
                f"ended with {process.returncode} after {whole['wall_s']:.0f} s: {errors.read_text()[-600:]}"
            )
    return [{"target": target.kind, "what": part} | record for record in [*records, whole]]


def is_done(records: list[Record], source: str) -> bool:
    """Whether a part's records are those of a process that ran to its end with this source."""
    return any(
        record["name"] == "process" and "error" not in record and record.get("source") == source for record in records
    )


def main(names: list[str]) -> int:
    """How many programs did not compile."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    start, failed = time.monotonic(), 0
    for name in names:
        for part in PARTS:
            source = source_of(part)
            found = [record for record in records if (record["target"], record["what"]) == (name, part)]
            if is_done(found, source):
                print(f"{name} {part}: of this source already", flush=True)
            else:
                records = [record for record in records if record not in found]
                found = [record | {"source": source} for record in run(TARGETS[name], part)]
                records += found
                written = RECORDS.with_suffix(".part")  # renamed when whole: a run that is cut short loses nothing
                written.write_text("".join(json.dumps(record) + "\n" for record in records))
                written.replace(RECORDS)
            errors = [record for record in found if "error" in record]
            failed += len(errors)
            print(
                f"{name} {part}: {found[-1]['wall_s']:.0f} s, {len(found) - 1} programs, {len(errors)} errors",
                flush=True,
            )
            REPORT.write_text(write_report(records))
    print(f"{(time.monotonic() - start) / 60:.1f} minutes in all; {failed} errors")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    targets = parser.parse_args().targets or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; targets are {', '.join(TARGETS)}")
    sys.exit(1 if main(targets) else 0)
