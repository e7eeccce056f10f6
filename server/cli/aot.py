"""`jaxserve aot`: whether a configuration fits a machine, before it is rented; flags in, a table out."""

import argparse

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.aot.fit import Fit, measure_fit
from jaxserve.aot.topologies import absent_devices, accelerator
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from models.checkpoint import read_model_config, resolve_model
from models.errors import CheckpointError

GIB = 2**30
CONCURRENCY_TOKENS = 4096
EXIT_DOES_NOT_FIT = 1


def add_aot_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="MACHINE",
        help="such as v5e:2x4, v6e:2x2 or h200; default: the configuration's mesh.topology",
    )
    parser.add_argument("--quick", action="store_true", help="compile only the largest steps, which decide what fits")


def run_aot(config: EngineConfig, parsed: argparse.Namespace) -> int:
    """Compiles the configuration's programs for an absent machine and prints what they take.

    The model may be a folder that holds nothing but a config.json.
    """
    jax.config.update("jax_platforms", "cpu")  # or jax would look for the machine that its compilers are for
    target = parsed.target or config.mesh.topology
    if target is None:
        raise ConfigError("which machine? give --target (such as v5e:2x4 or h200), or set mesh.topology")
    try:
        model = read_model_config(resolve_model(config.model.path))
    except CheckpointError as error:
        raise ConfigError(
            f"{error}; shapes are enough here: --model may name a folder with only a config.json"
        ) from error
    devices, usable_bytes = absent_devices(target), accelerator(target).usable_bytes
    console = Console()
    with console.status("") as status:
        fit = measure_fit(
            config,
            model,
            devices,
            usable_bytes=usable_bytes,
            only_largest=parsed.quick,
            progress=lambda name, done, total: status.update(f"compiling for {target}, {done + 1} of {total}: {name}"),
        )
    print_fit(console, fit, target)
    return 0 if fit.fits else EXIT_DOES_NOT_FIT


def print_fit(console: Console, fit: Fit, target: str) -> None:
    config = fit.config
    table = Table(title=f"{config.model.name} on {target}, per device", title_justify="left")
    for name in ("decode rows", "prefill blocks", "arguments", "temporaries", "of HBM", "compiled in"):
        table.add_column(name, justify="right")
    for program in fit.programs:
        shape, seconds = program.shape, f"{program.compile_s:.0f} s"
        total = program.argument_bytes + program.temporary_bytes
        memory = (_gib(program.argument_bytes), _gib(program.temporary_bytes), f"{total / fit.usable_bytes:.0%}")
        table.add_row(
            str(shape.decode_rows),
            str(shape.prefill_blocks),
            *(memory if program.refusal is None else ("refused", "", "")),
            seconds,
            style="" if program.refusal is None and total <= fit.usable_bytes else "red",
        )
    console.print(table)
    for program in fit.programs:
        if program.refusal is not None:
            console.print(f"[red]step of {program.shape}[/red]: {escape(program.refusal)}", highlight=False)
    pages = fit.num_pages - 1
    rows = {
        "devices": f"{config.mesh.tensor} of {target}, {_gib(fit.usable_bytes)} usable each",
        "computing": f"{config.model.dtype}, attention by {config.execution.attention_backend}",
        "weights": f"{_gib(fit.weight_bytes)} a device",
        "pages": f"{pages:,} of {fit.page_size} tokens, {_gib(pages * fit.page_bytes)} a device; "
        f"up to {max(0, fit.most_pages - 1):,} would fit (cache.memory_fraction, cache.num_pages)",
        "keys and values": f"{fit.num_tokens:,} tokens in {config.cache.dtype}, "
        f"{fit.page_bytes / fit.page_size:,.0f} bytes each a device (cache.dtype)",
        "concurrency": f"{fit.concurrency(CONCURRENCY_TOKENS)} requests of {CONCURRENCY_TOKENS:,} tokens at once"
        f" (the pages hold {fit.num_tokens // CONCURRENCY_TOKENS}, scheduler.max_num_seqs is "
        f"{config.scheduler.max_num_seqs})",
    }
    summary = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        summary.add_row(name, value)
    console.print(summary, highlight=False)
    console.print("it fits" if fit.fits else "[red]it does not fit[/red]: lower cache.memory_fraction or the buckets")


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
