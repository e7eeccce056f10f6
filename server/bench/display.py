"""Shows how a run goes while it goes: a bar on a terminal, a plain line now and then elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from server.bench.load import ClosedLoop, Progress
from server.bench.measure import Load

BAR_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 10.0


@asynccontextmanager
async def showing(console: Console, title: str, load: Load) -> AsyncIterator[Progress]:
    """Shows the progress that it gives until the block ends."""
    progress = Progress()
    task = asyncio.create_task((_bar if console.is_terminal else _lines)(console, title, load, progress))
    try:
        yield progress
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _bar(console: Console, title: str, load: Load, progress: Progress) -> None:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, refresh_per_second=1 / BAR_INTERVAL_S) as bar:
        task = bar.add_task(title, total=None, said="warming up")
        start: float | None = None
        while True:
            if progress.begun and start is None:
                start = time.monotonic()
            if start is not None:
                done, total = _share(load, progress, time.monotonic() - start)
                bar.update(task, completed=done, total=total, said=_said(progress, time.monotonic() - start))
            await asyncio.sleep(BAR_INTERVAL_S)


async def _lines(console: Console, title: str, load: Load, progress: Progress) -> None:
    start = time.monotonic()
    while True:
        said = _said(progress, time.monotonic() - start) if progress.begun else "warming up"
        console.print(f"{title}: {said}", highlight=False, markup=False, soft_wrap=True)
        await asyncio.sleep(PLAIN_INTERVAL_S)


def _share(load: Load, progress: Progress, elapsed_s: float) -> tuple[float, float | None]:
    """How much is done, of how much."""
    if isinstance(load.arrivals, ClosedLoop) and load.arrivals.duration_s is not None:
        return min(elapsed_s, load.arrivals.duration_s), load.arrivals.duration_s
    return progress.done, progress.total


def _said(progress: Progress, elapsed_s: float) -> str:
    of = f" of {progress.total}" if progress.total is not None else ""
    failed = f", {progress.failed} failed" if progress.failed else ""
    rate = progress.output_tokens / max(elapsed_s, 1e-9)
    return f"{progress.done}{of} done, {progress.begun - progress.done} open{failed}, {rate:.0f} tokens/s"
