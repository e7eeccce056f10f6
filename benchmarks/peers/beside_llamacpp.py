"""`jaxserve bench` on this server and on llama.cpp's (its Python package's), the same load on both, side by side.

usage: python benchmarks/peers/beside_llamacpp.py --python ENV/bin/python --gguf MODEL.gguf [bench's flags]  (4 minutes)

ENV is an environment of its own: CMAKE_ARGS=-DGGML_NATIVE=ON pip install 'llama-cpp-python[server]'. Its server
answers one request at a time; `--interrupt_requests false` makes others wait instead of ending the one that runs. Both
serve the embedded model: this one its own file in float32, llama.cpp the file that is given.
"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from server.config import ServeConfig
from server.planning.servers import running_server

THREADS = 2
CONTEXT = 1024
START_TIMEOUT_S = 120.0
CONFIG = ServeConfig.model_validate({"model": {"max_model_len": CONTEXT}, "scheduler": {"max_num_seqs": 16}})
DEFAULT_LOAD = ["--concurrency", "1,4", "--duration", "25s", "--input-tokens", "128", "--output-tokens", "32"]


@contextmanager
def llamacpp_server(python: Path, gguf: Path) -> Iterator[str]:
    """Its URL, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"model": gguf, "port": port, "n_ctx": CONTEXT, "n_threads": THREADS, "interrupt_requests": "false"}
    command = [
        str(python),
        "-m",
        "llama_cpp.server",
        *(str(part) for key in flags for part in (f"--{key}", flags[key])),
    ]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"llama.cpp's server does not answer: {' '.join(command)}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).is_success
    except httpx.TransportError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of the environment with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, required=True, help="of the embedded model")
    options, load = parser.parse_known_args()
    with running_server(CONFIG) as ours, llamacpp_server(options.python, options.gguf) as theirs:
        urls = ["--url", f"jaxserve={ours}", "--url", f"llama.cpp={theirs}"]
        command = ["bench", *urls, *(load or DEFAULT_LOAD)]
        print(f"$ jaxserve {' '.join(command)}", flush=True)
        return subprocess.run([sys.executable, "-m", "server", *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
