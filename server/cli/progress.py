"""Shows how loading and batch files go: bars on a terminal, plain lines elsewhere; knows neither engine nor files."""

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxserve.batch_file import BatchProgress

PLAIN_INTERVAL_S = 10.0


class LoadDisplay:
    """Shows how loading goes: a bar on a terminal, else a line a phase and a line each tenth of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_tenth: tuple[str, int] | None = None

    def update(self, phase: str, done: int, total: int) -> None:
        """Called from the engine's thread."""
        if not self._console.is_terminal:
            tenth = (phase, 10 * done // max(total, 1))
            if tenth != self._last_tenth:
                self._last_tenth = tenth
                self._console.print(f"{phase}: {done}/{total}", highlight=False)
            return
        if not self._tasks:
            self._bar.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total)
        self._bar.update(self._tasks[phase], completed=done, total=total)

    def close(self) -> None:
        if self._tasks:  # a bar that never started would print an empty line
            self._bar.stop()


class BatchDisplay:
    """Shows how a batch file goes: lines done, output tokens per second and the time that is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._start_time = time.monotonic()
        self._last_line_time = self._start_time

    def update(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        rate = progress.output_tokens / max(now - self._start_time, 1e-9)
        if self._console.is_terminal:
            if self._task is None:
                self._bar.start()
                # Lines of an earlier run are left out: they would make the time that is left look short.
                self._task = self._bar.add_task("lines", total=progress.total - progress.resumed, rate=rate)
            self._bar.update(self._task, completed=progress.done, rate=rate)
        elif now - self._last_line_time >= PLAIN_INTERVAL_S:
            self._last_line_time = now
            self._console.print(f"{_summary(progress)}, {rate:.0f} tokens/s{_left(progress, now - self._start_time)}")

    def close(self, progress: BatchProgress | None) -> None:
        """Ends the bar, and tells the whole if the run came to its end."""
        if self._task is not None:
            self._bar.stop()
        if progress is not None:
            seconds = time.monotonic() - self._start_time
            rate = progress.output_tokens / max(seconds, 1e-9)
            self._console.print(f"{_summary(progress)} in {seconds:.1f} s, {rate:.0f} tokens/s")


def _summary(progress: BatchProgress) -> str:
    parts = [f"{progress.done} of {progress.total - progress.resumed} lines"]
    if progress.resumed:
        parts.append(f"{progress.resumed} done before")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    parts.append(f"{progress.prompt_tokens} prompt and {progress.output_tokens} output tokens")
    return ", ".join(parts)


def _left(progress: BatchProgress, seconds: float) -> str:
    if not progress.done:
        return ""
    lines_left = progress.total - progress.resumed - progress.done
    return f", about {seconds / progress.done * lines_left:.0f} s left"
