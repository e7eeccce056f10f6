"""What `jaxserve aot` prints of a fit that was measured elsewhere."""

import io
from dataclasses import replace

from rich.console import Console
from tiny_engine import TinyOptions, tiny_config

from jaxserve.aot.fit import Fit, ProgramFit
from jaxserve.device.buckets import StepShape
from server.cli.aot import print_fit

GIB = 2**30
DECODE = ProgramFit(
    shape=StepShape(decode_rows=8, prefill_blocks=0), compile_s=12.3, argument_bytes=5 * GIB, temporary_bytes=GIB
)
FIT = Fit(
    config=tiny_config(TinyOptions()),
    usable_bytes=8 * GIB,
    weight_bytes=2 * GIB,
    page_bytes=GIB // 128,
    state_bytes=0,
    num_pages=1 + 384,
    programs=(DECODE,),
)


def printed(fit: Fit) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_fit(console, fit, "v5e:2x4")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_memory_pages_and_concurrency_are_told() -> None:
    text = printed(FIT)
    for told in (
        "tiny on v5e:2x4",
        "5.00 GiB",
        "1.00 GiB",
        "75%",
        "12 s",
        "384 of 8 tokens, 3.00 GiB",
        "3,072 tokens in float32, 1,048,576 bytes each",
    ):
        assert told in text
    assert "3,072 tokens in float32, 1,048,576 bytes each" in text
    assert "up to 639 would fit" in text  # 8 GiB without the weights and the temporaries, and without the dummy page
    assert "0 requests of 4,096 tokens at once (the pages hold 0, scheduler.max_num_seqs is 8)" in text
    assert text.rstrip().endswith("it fits")


def test_what_the_compiler_refuses_or_the_memory_cannot_hold_does_not_fit() -> None:
    too_large = printed(replace(FIT, programs=(replace(DECODE, temporary_bytes=4 * GIB),)))
    assert "112%" in too_large
    assert "it does not fit" in too_large
    refused = printed(replace(FIT, programs=(replace(DECODE, refusal="RESOURCE_EXHAUSTED: f32[64] [red] of vmem"),)))
    assert "refused" in refused
    assert "RESOURCE_EXHAUSTED: f32[64] [red] of vmem" in refused
    assert "it does not fit" in refused
