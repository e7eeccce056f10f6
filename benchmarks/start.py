"""How long a start takes, from the process to the first token over HTTP: first, second, from a bundle.

    python benchmarks/start.py [--config configs/cpu-demo.yaml] [--write] [-- flags of jaxserve serve]

Takes about three minutes on two quiet cores: each program is compiled twice, once for the first start and once for the
bundle. The cache is a temporary folder, so every run begins with none. `--write` puts the table into start.md.
CPU seconds are the process's, user and system; on a busy machine they say more than the others.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_suffix(".md")
COMMAND = [sys.executable, "-m", "server"]
VERBOSE = ["--set", "server.observability.log_level=info"]
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Seconds from the start of the process, unless the name says otherwise."""

    name: str
    listening: float
    ready: float
    first_token: float
    cpu: float
    weights_took: str
    programs_took: str
    compilations: int
    peak_mb: float


def measure(name: str, flags: list[str], env: dict[str, str]) -> Start:
    before = os.times()
    start = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *VERBOSE, *flags], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )
    assert process.stderr is not None
    told: list[str] = []
    try:
        address = ""
        while not address:
            line = process.stderr.readline()
            if not line:
                raise SystemExit("".join(told))
            told.append(line)
            address = line.removeprefix("listening on ").strip() if line.startswith("listening on ") else ""
        listening = time.monotonic() - start
        drain = threading.Thread(target=lambda: told.extend(process.stderr or ()), daemon=True)
        drain.start()
        model = wait_until_ready(process, address, told, start)
        ready = time.monotonic() - start
        request(f"{address}/v1/completions", {"model": model, "prompt": "Once upon a time", "max_tokens": 1})
        first_token = time.monotonic() - start
        metrics = request(f"{address}/metrics")
        status = Path(f"/proc/{process.pid}/status")
        peak_kb = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        drain.join()
    finally:
        process.kill()
        process.wait()
    after = os.times()
    log = "".join(told)
    return Start(
        name=name,
        listening=listening,
        ready=ready,
        first_token=first_token,
        cpu=after.children_user + after.children_system - before.children_user - before.children_system,
        weights_took=found(r"weights read in ([\d.]+ s)", log),
        programs_took=found(r"programs: (\d+ loaded.*? s)\b", log),
        compilations=int(float(found(r"^jaxserve:compilations_total\S* (\S+)", metrics))),
        peak_mb=int(peak_kb[1]) / 1024 if peak_kb else 0.0,
    )


def wait_until_ready(process: subprocess.Popen[str], address: str, told: list[str], start: float) -> str:
    """The served model's name."""
    while time.monotonic() - start < TIMEOUT_S:
        if process.poll() is not None:
            raise SystemExit("".join(told))
        try:
            request(f"{address}/health")
        except urllib.error.HTTPError:
            time.sleep(0.01)
            continue
        name: str = json.loads(request(f"{address}/v1/models"))["data"][0]["id"]
        return name
    raise SystemExit(f"not ready after {TIMEOUT_S:g} s:\n" + "".join(told))


def request(url: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as reply:
        text: str = reply.read().decode()
    return text


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else "?"


def table(starts: list[Start], flags: list[str]) -> str:
    lines = [
        f"`jaxserve serve {' '.join(flags)}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores",
        "",
        "| start | listening | ready | first token | CPU seconds | weights | programs | compilations | peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {s.name} | {s.listening:.1f} s | {s.ready:.1f} s | **{s.first_token:.1f} s** | {s.cpu:.1f} | "
        f"{s.weights_took} | {s.programs_took} | {s.compilations} | {s.peak_mb:.0f} MB |"
        for s in starts
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="of `jaxserve serve`; default: none, so every value is the default")
    parser.add_argument("--repeat", type=int, default=2, help="second starts and starts from the bundle")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("flags", nargs="*", help="more flags of `jaxserve serve`, after --")
    parsed = parser.parse_args()
    flags = ["--config", str(parsed.config), *parsed.flags] if parsed.config else parsed.flags
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONUNBUFFERED": "1"}
        bundle = f"{folder}/bundle"
        starts = [measure("first", flags, env)]
        starts += [measure("second", flags, env) for _ in range(parsed.repeat)]
        compile_flags = [*COMMAND, "compile", "--output", bundle, *flags]
        subprocess.run(
            compile_flags, check=True, cwd=ROOT, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        without_cache = ["--bundle", bundle, "--set", "execution.compilation_cache=null"]
        starts += [measure("bundle", [*flags, *without_cache], env) for _ in range(parsed.repeat)]
    text = table(starts, flags)
    print(text)
    if parsed.write:
        PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
