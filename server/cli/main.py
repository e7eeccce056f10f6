"""The `jaxserve` command: reads flags, calls the right floor, and tells errors in one line."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.console import Console

from jaxserve.batch_file import BatchProgress, run_batch_file
from jaxserve.config_file import config_yaml, read_config
from jaxserve.errors import JaxserveError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.startup.loading import compile_bundle, resolve_for
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from models.config import Quantization, WeightFormat
from models.errors import ModelError
from server.api.info import package_version
from server.bench.command import run_bench
from server.bench.errors import BenchError
from server.bench.flags import add_bench_flags
from server.cli.aot import add_aot_flags, run_aot
from server.cli.convert import convert
from server.cli.evaluate import add_evaluate_flags, run_evaluate
from server.cli.pages import add_pages_flags, run_pages
from server.cli.plan import add_plan_flags, run_plan
from server.cli.progress import BatchDisplay, LoadDisplay
from server.cli.run_batch import run_batch
from server.cli.simulation import add_profile_flags, add_simulate_flags, run_profile, run_simulate
from server.config import ServeConfig
from server.conformance.run import KINDS, print_results, run_cases
from server.grpc.serve import serve_engine
from server.serve import serve

EXIT_OURS = 2  # argparse uses the same for a wrong flag
EXIT_FAILED = 1  # the command ran, and what it checked did not hold
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# Flags that name a configuration key; each wins over --set, which wins over the file.
_KEYS = {
    "model": "model.path",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "host": "server.host",
    "port": "server.port",
    "engine": "server.engine",
    "listen": "server.grpc_listen",
    "shutdown_timeout": "server.shutdown_timeout_s",
    "strict_shapes": "execution.strict_shapes",
    "bundle": "execution.bundle",
    "bundle_fallback": "execution.bundle_fallback",
    "serve_while_compiling": "execution.serve_while_compiling",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script; leaves with the exit status."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 2 after an error of ours was told in one line."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.command(parsed)
    except (JaxserveError, ModelError, BenchError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return EXIT_OURS
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _serve(parsed: argparse.Namespace) -> int:
    serve(_config(parsed))
    return 0


def _engine(parsed: argparse.Namespace) -> int:
    serve_engine(_config(parsed))
    return 0


def _generate(parsed: argparse.Namespace) -> int:
    defaults = SamplingParams(max_tokens=parsed.max_tokens, temperature=parsed.temperature, seed=parsed.seed)
    console = Console(stderr=True)
    loading = LoadDisplay(console)
    try:
        llm = LLM.from_config(_config(parsed), progress=loading.update)
    finally:
        loading.close()
    display = BatchDisplay(console)
    result: BatchProgress | None = None
    try:
        result = run_batch_file(llm, parsed.input, parsed.output, defaults, display.update)
    finally:
        display.close(result)
    return 0


def _compile(parsed: argparse.Namespace) -> int:
    config = _config(parsed)
    display = LoadDisplay(Console(stderr=True))
    try:
        tokenizer = load_tokenizer(resolve_model(config.model.path))
        count = compile_bundle(config, tokenizer, parsed.output, progress=display.update)
    finally:
        display.close()
    print(f"wrote {count} programs to {parsed.output}; serve with --bundle {parsed.output}")
    return 0


def _run_batch(parsed: argparse.Namespace) -> int:
    console = Console(stderr=True)
    loading = LoadDisplay(console)
    display: BatchDisplay | None = None
    result: BatchProgress | None = None

    def on_progress(progress: BatchProgress) -> None:
        nonlocal display
        if display is None:  # the first one: the model is loaded
            loading.close()
            display = BatchDisplay(console)
        display.update(progress)

    try:
        result = run_batch(
            _config(parsed), parsed.input, parsed.output, on_loading=loading.update, on_progress=on_progress
        )
    finally:
        loading.close()
        if display is not None:
            display.close(result)
    return 0


def _convert(parsed: argparse.Namespace) -> int:
    quantization = None
    if parsed.quantize is not None:
        quantization = Quantization.made_at_load(
            parsed.quantize, group_size=parsed.group_size, embeddings=parsed.quantize_embeddings
        )
    display = LoadDisplay(Console(stderr=True))
    try:
        num_parameters = convert(
            parsed.source,
            parsed.target,
            dtype=parsed.dtype,
            quantization=quantization,
            calibration=parsed.calibration,
            report=display.update,
        )
    finally:
        display.close()
    print(f"wrote {num_parameters:,} parameters as {parsed.quantize or parsed.dtype} to {parsed.target}")
    return 0


def _profile(parsed: argparse.Namespace) -> int:
    return run_profile(_config(parsed), parsed)


def _aot(parsed: argparse.Namespace) -> int:
    return run_aot(_config(parsed), parsed)


def _evaluate(parsed: argparse.Namespace) -> int:
    return run_evaluate(_config(parsed), parsed)


def _simulate(parsed: argparse.Namespace) -> int:
    return run_simulate(_config(parsed), parsed)


def _conformance(parsed: argparse.Namespace) -> int:
    console = Console()
    results = asyncio.run(
        run_cases(
            parsed.url,
            model=parsed.model,
            api_key=parsed.api_key,
            kinds=parsed.kinds or KINDS,
            timeout_s=parsed.timeout,
        )
    )
    print_results(results, console, verbose=parsed.verbose)
    return EXIT_FAILED if any(result.outcome == "failed" for result in results) else 0


def _show_config(parsed: argparse.Namespace) -> int:
    config = _config(parsed)
    try:
        config = resolve_for(config, open_checkpoint(resolve_model(config.model.path)).config)
    except ModelError as error:
        print(f'# "auto" depends on the model, which cannot be read here: {error}')
    print(config_yaml(config), end="")
    return 0


def _plan(parsed: argparse.Namespace) -> int:
    return run_plan(lambda settings: _config(parsed, settings), parsed)


def _config(parsed: argparse.Namespace, more: Sequence[str] = ()) -> ServeConfig:
    """The command line's; `more` are `a.b=c`, which win over the others."""
    flags: dict[str, tuple[str, Any]] = {}
    for name, key in _KEYS.items():
        value = getattr(parsed, name, None)
        if value is not None:
            flags[key] = (f"--{name.replace('_', '-')}", value)
    return read_config(ServeConfig, path=parsed.config, assignments=[*parsed.assignments, *more], flags=flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxserve", description="Serves language models from a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"jaxserve {package_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")

    serve_command = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI's API")
    _add_config_flags(serve_command)
    serve_command.add_argument("--host", help="address to listen on")
    serve_command.add_argument("--port", help="port to listen on; 0 lets the system choose")
    serve_command.add_argument("--shutdown-timeout", help="seconds that running requests have to end after a signal")
    serve_command.add_argument(
        "--bundle", metavar="FOLDER", help="programs that `jaxserve compile` wrote; they run as code, so trust them"
    )
    serve_command.add_argument(
        "--bundle-fallback", action="store_true", default=None, help="compile where the bundle does not match"
    )
    serve_command.add_argument(
        "--serve-while-compiling", action="store_true", default=None, help="be ready with the fewest programs"
    )
    serve_command.add_argument(
        "--engine", metavar="HOST:PORT", help="an engine's process to serve, in place of one here"
    )
    serve_command.set_defaults(command=_serve)

    engine_command = commands.add_parser("engine", help="run the engine alone, for front ends and others over gRPC")
    _add_config_flags(engine_command)
    engine_command.add_argument("--listen", metavar="HOST:PORT", help="where front ends connect; port 0: any")
    engine_command.add_argument("--shutdown-timeout", help="seconds that running requests have to end after a signal")
    engine_command.set_defaults(command=_engine)

    compile_command = commands.add_parser("compile", help="compile every program into a bundle, for `serve --bundle`")
    _add_config_flags(compile_command)
    compile_command.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    compile_command.set_defaults(command=_compile)

    generate_command = commands.add_parser("generate", help="answer a file of prompts, one JSON object a line")
    _add_config_flags(generate_command)
    generate_command.add_argument("--input", type=Path, required=True, help="prompts, JSON lines")
    generate_command.add_argument(
        "--output", type=Path, required=True, help="answers, JSON lines; resumed if it exists"
    )
    generate_command.add_argument("--max-tokens", type=int, help="of a line that says nothing else; default: no limit")
    generate_command.add_argument("--temperature", type=float, default=1.0, help="of a line that says nothing else")
    generate_command.add_argument("--seed", type=int, help="of a line that says nothing else")
    generate_command.set_defaults(command=_generate)

    batch_command = commands.add_parser("run-batch", help="answer a file of requests in OpenAI's batch format")
    _add_config_flags(batch_command)
    batch_command.add_argument("--input", type=Path, required=True, help="requests, JSON lines")
    batch_command.add_argument("--output", type=Path, required=True, help="answers, JSON lines; resumed if it exists")
    batch_command.set_defaults(command=_run_batch)

    convert_command = commands.add_parser("convert", help="write a checkpoint as an Orbax one, tokenizer included")
    convert_command.add_argument("source", metavar="SRC", help="the embedded model's name, a folder or a .gguf file")
    convert_command.add_argument("target", metavar="DST", type=Path, help="a folder that holds no checkpoint yet")
    convert_command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    convert_command.add_argument("--quantize", choices=get_args(WeightFormat), help="the layers' matrices")
    convert_command.add_argument(
        "--group-size", type=int, choices=(32, 64, 128), default=32, help="of int4: inputs that share a scale"
    )
    convert_command.add_argument("--quantize-embeddings", action="store_true", help="the embedding and head as well")
    convert_command.add_argument(
        "--calibration", type=Path, nargs="+", default=(), metavar="FILE",
        help="prose, UTF-8, that the rounding is fitted to: slower, closer; without, the nearest code",
    )  # fmt: skip
    convert_command.set_defaults(command=_convert)

    evaluate_command = commands.add_parser("evaluate", help="what narrow weights and caches do to a model's answers")
    _add_config_flags(evaluate_command)
    add_evaluate_flags(evaluate_command)
    evaluate_command.set_defaults(command=_evaluate)

    profile_command = commands.add_parser("profile", help="measure this device: the time of each compiled step")
    _add_config_flags(profile_command)
    add_profile_flags(profile_command)
    profile_command.set_defaults(command=_profile)

    aot_command = commands.add_parser("aot", help="whether a configuration fits a machine that is not here yet")
    _add_config_flags(aot_command)
    add_aot_flags(aot_command)
    aot_command.set_defaults(command=_aot)

    simulate_command = commands.add_parser("simulate", help="replay traffic against measured step times, in no time")
    _add_config_flags(simulate_command)
    add_simulate_flags(simulate_command)
    simulate_command.set_defaults(command=_simulate)

    conformance_command = commands.add_parser(
        "conformance", help="check any server of OpenAI's API: what it promises, and what it survives"
    )
    conformance_command.add_argument("--url", required=True, help="such as http://127.0.0.1:8000")
    conformance_command.add_argument("--model", help="the id to ask for; default: the first that the server lists")
    conformance_command.add_argument("--api-key", help="sent as a bearer token")
    conformance_command.add_argument(
        "--kind", dest="kinds", action="append", choices=KINDS, help="only this kind; may be repeated"
    )
    conformance_command.add_argument("--timeout", type=float, default=60.0, metavar="S", help="of a request")
    conformance_command.add_argument("--verbose", action="store_true", help="tell what held, too")
    conformance_command.set_defaults(command=_conformance)

    bench_command = commands.add_parser("bench", help="load any server of OpenAI's API, and measure it honestly")
    add_bench_flags(bench_command)
    bench_command.set_defaults(command=run_bench)

    plan_command = commands.add_parser("plan", help="find the load that keeps a promise, and the setting that moves it")
    _add_config_flags(plan_command)
    add_plan_flags(plan_command)
    plan_command.set_defaults(command=_plan)

    pages_command = commands.add_parser("pages", help="show what the pages of a running server hold")
    add_pages_flags(pages_command)
    pages_command.set_defaults(command=run_pages)

    config_command = commands.add_parser("config", help="look at a configuration")
    config_commands = config_command.add_subparsers(required=True, metavar="command")
    show_command = config_commands.add_parser("show", help="print the whole configuration as YAML")
    _add_config_flags(show_command)
    show_command.set_defaults(command=_show_config)
    return parser


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML; flags and --set win over it")
    parser.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="A.B=C", help="set one key; may be repeated"
    )
    parser.add_argument("--model", help="the embedded model's name, a folder or a .gguf file")
    parser.add_argument("--served-model-name", help="the name that clients ask for")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", help="tokens per request, prompt and output")
    parser.add_argument(
        "--strict-shapes", action="store_true", default=None, help="a compilation in traffic is an error"
    )
