"""A scripted server in a process of its own, so that it and its client do not wait for each other's turns."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server_process(*, stall_at_s: float = 0.0, stall_s: float = 0.0) -> Iterator[str]:
    """Its URL. It freezes once for `stall_s`, `stall_at_s` after its first request."""
    command = [sys.executable, str(Path(__file__).with_name("scripted_server.py")), "0", str(stall_at_s), str(stall_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
