"""Runs the compilers for each target in processes of their own, keeps what they say in aot.jsonl, writes aot.md of it.

usage: python -m benchmarks.aot [TARGET ...]      (all targets; those named only, beside what aot.jsonl has of others)

A target has five parts: its kernels' seconds, the compiler's own reports of them, whole steps, layers in a loop, and
layers with narrow weights. What is done is kept program by program, so a run that was cut short, or lost a part to an
error, goes on where it stood; a program is compiled again when its shape or the source that it comes from has changed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.aot import gpu, llo
from benchmarks.aot.program import ROOT, Record
from benchmarks.aot.report import write_report
from benchmarks.aot.targets import TARGETS, Target
from jaxserve.aot.topologies import accelerator

RECORDS, REPORT = ROOT / "benchmarks/aot.jsonl", ROOT / "benchmarks/aot.md"

PARTS = ("kernels", "reports", "steps", "layers", "weights")
# Two quiet cores need 10 minutes for the slowest part. The limit is for compilers that hang, not for busy machines.
LIMIT_S = 7200


def run(target: Target, part: str, done: dict[str, Record]) -> Iterator[Record]:
    """The records of one process and, where it failed, one of the process itself.

    Args:
      done: earlier records by key, which need not be made again.
    """
    start = time.monotonic()
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.aot.compile", target.kind, part]
    of_part = {"target": target.kind, "what": part}
    with tempfile.TemporaryDirectory() as folder:
        keys, errors, dump = Path(folder) / "keys", Path(folder) / "stderr", Path(folder) / "dump"
        keys.write_text("\n".join(done))
        if part == "reports":
            dump.mkdir()
            on_tpu = accelerator(target.topology).platform == "tpu"
            environment |= {"LIBTPU_INIT_ARGS": f"{llo.DUMP_FLAGS}{dump}"} if on_tpu else gpu.dump_environment(dump)
            command.append(str(dump))
        with (
            keys.open() as stdin,
            errors.open("w") as stderr,
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True
            ) as process,
        ):
            watch = threading.Timer(LIMIT_S, process.kill)
            watch.start()
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    record = json.loads(line)
                    yield done[record["key"]] if record["key"] in done else of_part | record
            process.wait()
            watch.cancel()
        if process.returncode:
            seconds = time.monotonic() - start
            why = f"ended with {process.returncode} after {seconds:.0f} s: {errors.read_text()[-600:]}"
            if process.returncode == -signal.SIGKILL and seconds >= LIMIT_S:
                why = f"given up after {LIMIT_S} s"
            yield of_part | {"name": "process", "error": why}


def save(records: list[Record]) -> None:
    written = RECORDS.with_suffix(".part")  # renamed when whole: a run that is cut short loses nothing
    written.write_text("".join(json.dumps(record) + "\n" for record in records))
    written.replace(RECORDS)
    REPORT.write_text(write_report(records))


def is_done(record: Record) -> bool:
    return "key" in record and "error" not in record


def main(names: list[str]) -> int:
    """How many programs did not compile."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    start, failed = time.monotonic(), 0
    for name in names:
        for part in PARTS:
            began = time.monotonic()
            others = [record for record in records if (record["target"], record["what"]) != (name, part)]
            done = {record["key"]: record for record in records if record not in others and is_done(record)}
            found: list[Record] = []
            left = dict(done)  # earlier records of programs that the process has not come to yet
            for record in run(TARGETS[name], part, done):
                found.append(record)
                if left.pop(record.get("key", ""), None) is None:
                    print(json.dumps(record), flush=True)
                    save([*others, *found, *left.values()])
            if all(record["name"] != "process" for record in found):
                left = {}  # of other source than today's
            records = [*others, *found, *left.values()]
            save(records)
            errors = sum("error" in record for record in found)
            failed += errors
            print(f"{name} {part}: {time.monotonic() - began:.0f} s, {len(found)} records, {errors} errors", flush=True)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes in all; {failed} errors")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    targets = parser.parse_args().targets or list(TARGETS)
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; targets are {', '.join(TARGETS)}")
    sys.exit(1 if main(targets) else 0)
