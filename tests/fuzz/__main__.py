"""Fuzzes what comes from outside: bodies, gRPC messages, streams, model files. Prints what it did, and each fault once.

usage: python -m tests.fuzz [--minutes 30] [--targets bodies messages streams files] [--seed 0]

The targets run one after the other, each for its share of the time; a second run with another --seed sees other cases.
Exits with 1 if anything was found. A fault names its seed: --seed N --targets T comes upon it again in its first batch.
"""

import argparse
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tests.fuzz.bodies import body_target
from tests.fuzz.files import file_target
from tests.fuzz.messages import message_target
from tests.fuzz.streams import stream_target
from tests.fuzz.target import Result, Target, fuzz

TARGETS: dict[str, Callable[[Path], AbstractContextManager[Target]]] = {
    "bodies": body_target,
    "messages": message_target,
    "streams": stream_target,
    "files": file_target,
}
# Streams are read without a server, a hundred times faster than bodies are answered.
SHARES = {"bodies": 4, "messages": 3, "streams": 1, "files": 4}
BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all targets together")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, help="end after so many batches of a target, however much time is left")
    parser.add_argument("--batch", type=int, default=BATCH, help="cases of a batch")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so the servers end, too
    logging.disable(logging.CRITICAL)  # refusals are what it is about, and libraries log each
    whole = sum(SHARES[name] for name in options.targets)
    num_faults = 0
    for name in options.targets:
        seconds = options.minutes * 60 * SHARES[name] / whole
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, TARGETS[name](Path(folder)) as target:
            result = fuzz(
                target, seconds=seconds, first_seed=options.seed, batch=options.batch, batches=options.batches
            )
        show(name, result, time.monotonic() - start)
        num_faults += len(result.faults)
    return 1 if num_faults else 0


def show(name: str, result: Result, seconds: float) -> None:
    print(f"{name}: {result.cases} cases in {seconds:.0f} s, the slowest {result.slowest_s:.2f} s")
    for outcome, count in result.outcomes.most_common():
        print(f"  {count:7} {outcome}")
    for what, story in result.faults.items():
        print(f"FAULT: {what}\n{story}")
    print(f"  {len(result.faults):7} faults", flush=True)


if __name__ == "__main__":
    sys.exit(main())
