"""A short run of every fuzz target, the same cases each time; `python -m tests.fuzz` is the long one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = 80


@pytest.mark.slow
def test_no_case_of_a_short_run_is_a_fault() -> None:
    """In a process of its own: a crash there is a failure here, and the bound on memory is nobody else's."""
    command = [sys.executable, "-m", "tests.fuzz", "--minutes", "10", "--batches", "1", "--batch", str(CASES)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    counts = dict(re.findall(r"^(\w+): (\d+) cases", run.stdout, re.MULTILINE))
    assert counts.keys() == {"bodies", "messages", "streams", "files"}
    assert all(int(count) >= CASES for count in counts.values()), counts
