"""Progress output: bars on a terminal, few lines elsewhere."""

import io

from rich.console import Console

from harbortrainer.runs import display
from harbortrainer.runs.display import Display


def shown(*, terminal: bool) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, force_terminal=terminal, width=100)), out


def test_fast_bar_prints_nothing_without_terminal():
    it, out = shown(terminal=False)
    with it, it.bar("sampling", 3) as bar:
        for _ in range(3):
            bar.advance()
    assert out.getvalue() == ""


def test_slow_bar_prints_progress_without_terminal(monkeypatch):
    monkeypatch.setattr(display, "PLAIN_EVERY_S", 0.0)
    it, out = shown(terminal=False)
    with it, it.bar("sampling", 3) as bar, it.bar("steps", 9, plain=False) as steps:
        bar.advance()
        bar.advance()
        steps.advance()
    assert out.getvalue().splitlines() == ["sampling: 1/3", "sampling: 2/3"]


def test_terminal_shows_bars_and_lines():
    it, out = shown(terminal=True)
    with it, it.bar("sampling", 3) as bar:
        bar.advance()
        it.line("step 1")
        assert it.progress is not None
        it.progress.refresh()
    assert "step 1" in out.getvalue()
    assert "1/3" in out.getvalue()


def test_line_is_printed_unchanged():
    it, out = shown(terminal=False)
    it.line("[bold]not markup[/bold]")
    assert out.getvalue() == "[bold]not markup[/bold]\n"
