"""The `jaxserve` command: configuration in, one line and status 2 for errors, and each subcommand on a tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import yaml

from jaxserve.compilations import COMPILATIONS
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint import open_checkpoint
from server.cli.main import run
from server.config import ServeConfig

ROOT = Path(__file__).parents[3]
LLAMA_8B = str(ROOT / "configs/models/llama-3.1-8b")
READY_TIMEOUT_S = 300.0


def small_flags(model: Path) -> list[str]:
    settings = [
        "cache.num_pages=65",
        "scheduler.max_num_seqs=2",
        "scheduler.max_num_batched_tokens=34",
        "execution.decode_buckets=[2]",
        "execution.prefill_buckets=[1]",
    ]
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["--model", str(model), "--served-model-name", "tiny", "--max-model-len", "128", *sets]


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="would compile for minutes: libtpu is installed")
def test_aot_without_the_compiler_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["aot", "--config", str(ROOT / "configs/tpu-v5e-8.yaml"), "--model", LLAMA_8B]) == 2
    assert "compiling for v5e:2x4 needs libtpu, which is not installed: pip install" in capsys.readouterr().err


def test_config_show_prints_the_whole_configuration_that_the_flags_make(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--config", str(ROOT / "configs/cpu-demo.yaml"), "--set", "scheduler.max_num_seqs=3", "--model", "x.gguf"]
    assert run(["config", "show", *flags]) == 0
    config = ServeConfig.model_validate(yaml.safe_load(capsys.readouterr().out))
    assert config.scheduler.max_num_seqs == 3
    assert config.model.path == "x.gguf"
    assert config.model.max_model_len == 2048


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["config", "show", "--set", "scheduler.max_num_seq=3"], "did you mean scheduler.max_num_seqs?"),
        (["config", "show", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["config", "show", "--max-model-len", "many"], "--max-model-len"),
        (["serve", "--model", "no/such/model"], "no/such/model"),
        (["serve", "--port", "99999"], "server.port is '99999' (--port)"),
        (["serve", "--host", "256.0.0.1"], "server.host"),
        (["convert", "no/such/model", "target"], "no/such/model"),
        (["generate", "--model", "no/such/model", "--input", "a", "--output", "b"], "no/such/model"),
        (["aot"], "give --target (such as v5e:2x4 or h200), or set mesh.topology"),
        (["aot", "--target", "v1:2x2", "--model", LLAMA_8B], "topology 'v1:2x2' is unknown; known kinds are v5e"),
        (["aot", "--target", "h200", "--model", "no/such/model"], "--model may name a folder with only a config.json"),
        (["config", "show", "--set", "mesh.tensor=64"], "mesh.tensor is 64; here is only"),
        (["config", "show", "--set", "mesh.tensor=0"], "mesh.tensor is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: ")
    assert error.count("\n") == 1
    assert told in error


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--colour", "red"], ["config"]])
def test_a_wrong_command_line_shows_the_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    assert "usage: jaxserve" in capsys.readouterr().err


def test_convert_writes_the_same_weights_and_tokenizer(
    tiny_model: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "orbax"
    assert run(["convert", str(tiny_model), str(target)]) == 0
    assert "parameters as float32" in capsys.readouterr().out
    source, converted = open_checkpoint(tiny_model), open_checkpoint(target)
    assert converted.config == source.config
    assert converted.names() == source.names()
    assert load_tokenizer(target).encode("Hello, wörld 🎉") == tokenizer.encode("Hello, wörld 🎉")
    assert run(["convert", str(tiny_model), str(target)]) == 2  # never over an existing checkpoint


def test_convert_quantizes_once_what_a_start_then_reads_as_it_is(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "narrow"
    assert run(["convert", str(tiny_model), str(target), "--quantize", "int8"]) == 0
    assert "parameters as int8" in capsys.readouterr().out
    assert run(["config", "show", *small_flags(target)]) == 0
    assert "quantization: int8" in capsys.readouterr().out  # auto: as it is stored
    assert run(["config", "show", *small_flags(target), "--set", "model.quantization=int4"]) == 2
    assert "is quantized already, as int8; set it to auto" in capsys.readouterr().err
    assert run(["convert", str(target), str(tmp_path / "again"), "--quantize", "int4"]) == 2


def test_generate_answers_a_file_of_prompts(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}], "max_tokens": 3}, {"prompt": ""}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--input", str(source), "--output", str(target)]
    flags = [*small_flags(tiny_model), "--max-tokens", "5", "--temperature", "0"]
    assert run(["generate", *files, *flags]) == 0
    results = sorted((json.loads(line) for line in target.read_text().splitlines()), key=lambda line: line["line"])
    assert len(results) == 3
    assert "error" in results[2]
    told = capsys.readouterr().err
    assert "3 of 3 lines" in told
    assert "1 failed" in told


@pytest.mark.slow
def test_compile_writes_a_bundle_that_a_start_needs_no_compiler_for(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    assert run(["compile", "--output", str(bundle), *small_flags(tiny_model)]) == 0
    assert f"wrote 5 programs to {bundle}" in capsys.readouterr().out
    files = [str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers.jsonl")]
    Path(files[0]).write_text('{"prompt": "hi"}\n')
    generate = ["generate", "--input", files[0], "--output", files[1], "--max-tokens", "2"]
    before = COMPILATIONS.total
    assert run([*generate, *small_flags(tiny_model), "--set", f"execution.bundle={bundle}"]) == 0
    assert COMPILATIONS.total == before
    assert "error" not in json.loads(Path(files[1]).read_text())
    other = [*small_flags(tiny_model), "--set", "cache.num_pages=64", "--set", f"execution.bundle={bundle}"]
    assert run([*generate, *other]) == 2
    assert "compiled for another num_pages: it has 65, this start 64" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "is_cold"), [pytest.param(signal.SIGINT, True, id="cold"), pytest.param(signal.SIGTERM, False, id="warm")]
)
def test_serve_listens_at_once_becomes_ready_and_ends_on_a_signal(
    tiny_model: Path, end: signal.Signals, is_cold: bool
) -> None:
    command = "from server.cli.main import main; main()"
    flags = small_flags(tiny_model)
    if is_cold:
        flags += ["--set", "execution.compilation_cache=null"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("listening on ").strip()
        health = httpx.get(address + "/health", timeout=60)
        if is_cold:  # with programs from the cache it may be ready already
            assert (health.status_code, health.json()["status"]) == (503, "loading")
        deadline = time.monotonic() + READY_TIMEOUT_S
        while httpx.get(address + "/health", timeout=60).status_code != 200:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
        assert httpx.post(address + "/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] <= 2
        process.send_signal(end)
        assert process.wait(timeout=60) in (0, 130, -signal.SIGTERM)
        told = process.stderr.read()
        assert "programs: " in told
        assert f"ready: tiny in float32 at {address}/v1" in told
        assert "Traceback" not in told
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.slow
def test_serve_ends_with_status_2_when_the_model_cannot_be_loaded(tiny_model: Path) -> None:
    command = "from server.cli.main import main; main()"
    finished = subprocess.run(
        [sys.executable, "-c", command, "serve", "--port", "0", "--model", str(tiny_model), "--max-model-len", "9999"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=READY_TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[-1].startswith("jaxserve: model.max_model_len is 9999")
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_an_engine_and_a_front_end_apart_answer_as_one_server(tiny_model: Path) -> None:
    """Two real processes around a real model: the front end loads no weights, and answers what the engine computes."""
    main = [sys.executable, "-c", "from server.cli.main import main; main()"]
    flags, environment = small_flags(tiny_model), os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*main, "engine", "--listen", "127.0.0.1:0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as engine:
        assert engine.stderr is not None
        address = engine.stderr.readline().removeprefix("listening on ").strip()
        with subprocess.Popen(
            [*main, "serve", "--port", "0", "--engine", address, *flags],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        ) as front:
            try:
                assert front.stderr is not None
                url = front.stderr.readline().removeprefix("listening on ").strip()
                deadline = time.monotonic() + READY_TIMEOUT_S
                while httpx.get(url + "/ready", timeout=60).status_code != 200:
                    assert engine.poll() is None
                    assert front.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                body = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": True}
                first, again = (httpx.post(url + "/v1/completions", json=body, timeout=60).json() for _ in range(2))
                assert first["choices"] == again["choices"]
                assert len(first["choices"][0]["logprobs"]["tokens"]) == first["usage"]["total_tokens"]
                assert first["choices"][0]["text"].startswith("hi")
                embedded = httpx.post(url + "/v1/embeddings", json={"model": "tiny", "input": "hi"}, timeout=60).json()
                assert sum(value**2 for value in embedded["data"][0]["embedding"]) == pytest.approx(1.0, abs=1e-3)
                for process in (front, engine):
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(timeout=60) == 0
            finally:
                front.kill()
                engine.kill()
