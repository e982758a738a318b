"""Progress output: bars on a terminal, plain lines elsewhere, the seconds of slow imports, and the next commands.

Invariant: without a terminal (a log file, CI) nothing is overwritten, and a bar prints at most one line per
`PLAIN_EVERY_S` seconds.
"""

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from harbortrainer.runs.live_status import Phase

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_EVERY_S = 10.0
_NAMED = 3


def plural(number: int, one: str) -> str:
    """Format a count with its noun.

    Example:
        >>> plural(1, "trial"), plural(2, "trial")
        ('1 trial', '2 trials')
    """
    return f"{number} {one if number == 1 else one + 's'}"


def name_first(names: Sequence[str]) -> str:
    """Name the first three, and the number of the others.

    Example:
        >>> name_first(["a", "b", "c", "d"])
        'a; b; c and 1 more'
    """
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


class Bar:
    """A progress bar."""

    def __init__(self, display: "Display", text: str, total: int | None, *, plain: bool) -> None:
        self.display, self.text, self.total, self.done, self.plain = display, text, total, 0, plain
        self._last, self.since = time.monotonic(), time.time()
        self._task = display.progress.add_task(text, total=total) if display.progress else None

    def advance(self, by: int = 1) -> None:
        """Advance by this amount."""
        self.set(self.done + by)

    def set(self, done: int) -> None:
        """Set the amount done."""
        self.done = done
        if self.display.progress is not None and self._task is not None:
            self.display.progress.update(self._task, completed=done)
        elif self.plain and time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.display.line(f"{self.text}: {done}" + (f"/{self.total}" if self.total else ""))

    @property
    def phase(self) -> Phase:
        """The bar as a phase of the live status."""
        return Phase(text=self.text, since=self.since, done=self.done, total=self.total)

    def close(self) -> None:
        """Remove the bar."""
        if self.display.progress is not None and self._task is not None:
            self.display.progress.remove_task(self._task)


class Display:
    """Progress bars and lines on one console."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console

        self.console = console or Console(highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        self._bars: list[Bar] = []

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
            )

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.progress = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
            self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all bars and release the terminal."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(text, markup=False, highlight=False)

    @contextmanager
    def phase(self, text: str) -> Generator[None]:
        """Show a bar during a block, and print its seconds afterwards."""
        with self.bar(text) as bar:
            yield
        self.line(f"{text}: {time.time() - bar.since:.1f} s")

    @property
    def phases(self) -> list[Phase]:
        """The open bars, the outermost first; safe to call from another thread."""
        return [bar.phase for bar in self._bars.copy()]

    @contextmanager
    def bar(self, text: str, total: int | None = None, *, plain: bool = True) -> Generator[Bar]:
        """Show a bar during a block; with `plain`, print progress lines if there is no terminal."""
        bar = Bar(self, text, total, plain=plain)
        self._bars.append(bar)
        try:
            yield bar
        finally:
            self._bars.remove(bar)
            bar.close()


@contextmanager
def loading(what: str, module: str) -> Generator[None]:
    """Print a line with the seconds of a block with slow imports, unless `module` is already imported."""
    if module in sys.modules:
        yield
        return
    print(f"loading {what} ...", end="", flush=True)
    started = time.monotonic()
    try:
        yield
    finally:
        print(f" {time.monotonic() - started:.1f} s", flush=True)


def next_lines(commands: Sequence[tuple[str, str]]) -> list[str]:
    """Format the commands that a user may want to type next, each with its purpose."""
    width = max(len(command) for command, _ in commands)
    return ["next:", *(f"  {command:<{width}}  # {purpose}" for command, purpose in commands)]
