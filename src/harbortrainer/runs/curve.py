"""The reward curve of a run: in the terminal, and as a PNG. Both read `metrics.jsonl`.

Invariant: every finite reward lies within what is drawn.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAIN_KEY = "train/agg/all/agent/reward/mean"


@dataclass(slots=True)
class Curve:
    """Mean rewards by step."""

    train: list[tuple[int, float]] = field(default_factory=list)
    """Of every trial that came back for a step."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Of the evaluations, over all sources."""


def curve_of(rows: Sequence[Mapping[str, Any]]) -> Curve:
    """The curve in the lines of `metrics.jsonl`."""
    curve = Curve()
    for row in rows:
        for key, points in ((TRAIN_KEY, curve.train), ("eval/mean_reward", curve.held_out)):
            if row.get(key) is not None:
                points.append((row["step"], row[key]))
    return curve


def as_text(curve: Curve, width: int = 76, height: int = 16) -> str:
    """The curve in characters; empty when there is nothing to draw."""
    if not (curve.train or curve.held_out):
        return ""
    plotext = importlib.import_module("plotext")
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.ylim(*span(curve))
    if curve.train:
        plotext.plot(*_columns(curve.train), label="training trials", marker="braille")
    if curve.held_out:
        plotext.scatter(*_columns(curve.held_out), label="held-out tasks", marker="●")
    plotext.title("mean reward by step")
    text = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_png(curve: Curve, path: Path, title: str) -> None:
    """The curve as a picture."""
    if not (curve.train or curve.held_out):
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="mean reward", ylim=span(curve, margin=0.02), title=title)
    if curve.train:
        axes.plot(*_columns(curve.train), label="training trials", color="#4878a8", alpha=0.8)
    if curve.held_out:
        axes.plot(*_columns(curve.held_out), "o--", label="held-out tasks", color="#c44e52")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    FigureCanvasAgg(figure).print_png(str(path))


def span(curve: Curve, margin: float = 0.0) -> tuple[float, float]:
    """The lowest and highest value to be shown: at least 0 to 1, and whatever lies outside.

    Example:
        >>> span(Curve(train=[(1, -2.0)]))
        (-2.0, 1.0)
    """
    values = [value for _, value in (*curve.train, *curve.held_out)]
    low, high = min(0.0, *values), max(1.0, *values)
    return low - margin * (high - low), high + margin * (high - low)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
