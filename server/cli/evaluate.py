"""The command `evaluate`: its flags, and the table of what each setting costs and saves; measuring is below."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar, get_args

from rich.console import Console

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.evaluation import Evaluation, Setting, evaluate
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import resolve_model
from models.config import WeightFormat
from pallas_kernels.kv_dtype import KVDtype
from server.cli.progress import LoadDisplay

T = TypeVar("T")


def add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="prose, UTF-8; 10 kB say something")
    parser.add_argument("--kv-dtype", type=_kv_dtypes, default=(), metavar="A,B", help="cache.dtype of the rows")
    parser.add_argument(
        "--quantization", type=_formats, default=(), metavar="A,B", help="model.quantization of more rows"
    )
    parser.add_argument("--window", type=_window, default=512, help="tokens that are predicted from each other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")


def run_evaluate(config: EngineConfig, parsed: argparse.Namespace) -> int:
    """Evaluates every setting against the unquantized model and prints a row each."""
    try:
        text = parsed.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {parsed.text}: {error}") from None
    settings = [Setting(kv_dtype=dtype) for dtype in parsed.kv_dtype]
    settings += [Setting(quantization=format) for format in parsed.quantization]
    display = LoadDisplay(Console(stderr=True))
    try:
        tokenizer = load_tokenizer(resolve_model(config.model.path))
        rows = evaluate(
            config, tokenizer, tokenizer.encode(text), settings, window=parsed.window, report=display.update
        )
    finally:
        display.close()
    if parsed.json is not None:
        parsed.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    print(f"{rows[0].num_tokens:,} tokens predicted, in windows of {parsed.window}:\n\n{markdown(rows)}", end="")
    return 0


_HEADER = (
    "weights",
    "KV",
    "perplexity",
    "change",
    "agreement",
    "KL (nats)",
    "weights (MB)",
    "KV bytes/token",
    "pages/GiB",
    "1k requests/GiB",
    "tokens/s",
)


def markdown(rows: Sequence[Evaluation]) -> str:
    """The table, as a document can take it; the first row is what the others are compared with."""
    lines = [_HEADER, ("---",) * 2 + ("---:",) * (len(_HEADER) - 2), *(_cells(row, rows[0]) for row in rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _cells(row: Evaluation, reference: Evaluation) -> tuple[str, ...]:
    return (
        row.quantization,
        row.kv_dtype,
        f"{row.perplexity:.3f}",
        f"{(row.perplexity / reference.perplexity - 1) * 100:+.2f} %",
        f"{row.agreement * 100:.1f} %",
        f"{max(0.0, row.kl):.5f}",
        f"{row.weight_bytes / 1e6:.0f}",
        f"{row.kv_bytes_per_token:,}",
        f"{row.pages_per_gib:,}",
        f"{row.requests_per_gib:,}",
        f"{row.tokens_per_s:.0f}",
    )


def _kv_dtypes(text: str) -> tuple[KVDtype, ...]:
    return _listed(text, get_args(KVDtype))


def _formats(text: str) -> tuple[WeightFormat, ...]:
    return _listed(text, get_args(WeightFormat))


def _listed(text: str, known: tuple[T, ...]) -> tuple[T, ...]:
    by_name = {str(name): name for name in known}
    for name in text.split(","):
        if name not in by_name:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(by_name)}")
    return tuple(by_name[name] for name in text.split(","))


def _window(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens from 2 on")
    return int(text)
