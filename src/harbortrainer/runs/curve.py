"""The reward curve of a run, as text and as PNG, from `metrics.jsonl`.

Invariant: the axes include every finite reward.
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
    """Mean reward of all completed training trials, by step."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Mean reward of the evaluations over all sources, by step."""


def curve_of(rows: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the curve from lines of `metrics.jsonl`."""
    curve = Curve()
    for row in rows:
        for key, points in ((TRAIN_KEY, curve.train), ("eval/mean_reward", curve.held_out)):
            if row.get(key) is not None:
                points.append((row["step"], row[key]))
    return curve


def as_text(curve: Curve) -> str:
    """Draw the curve as text; empty if there are no points."""
    if not (curve.train or curve.held_out):
        return ""
    plotext = importlib.import_module("plotext")
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(76, 16)
    plotext.ylim(*span(curve))
    if curve.train:
        plotext.plot(*_columns(curve.train), label="training trials", marker="braille")
    if curve.held_out:
        plotext.scatter(*_columns(curve.held_out), label="held-out tasks", marker="●")
    plotext.title("mean reward by step")
    text = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_png(curve: Curve, path: Path, title: str) -> None:
    """Write the curve as a PNG; no file if there are no points."""
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
    """Return the range of the reward axis: 0 to 1, extended to all values.

    Example:
        >>> span(Curve(train=[(1, -2.0)]))
        (-2.0, 1.0)
    """
    values = [value for _, value in (*curve.train, *curve.held_out)]
    low, high = min(0.0, *values), max(1.0, *values)
    return low - margin * (high - low), high + margin * (high - low)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
