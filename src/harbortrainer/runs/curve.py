"""The reward curve of a run, as text and as PNG, from `metrics.jsonl`.

Invariant: the axes include every finite reward.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TRAIN_KEY = "train/agg/all/agent/reward/mean"


@dataclass(slots=True)
class Curve:
    """Mean rewards by step."""

    train: list[tuple[int, float]] = field(default_factory=list)
    """Mean reward of all completed training trials, by step."""
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    """Mean reward of the evaluations over all sources, by step."""
    evaluation: str = "held-out"
    """What the evaluated tasks are called (`provenance.evaluation_name`)."""

    def until(self, step: int) -> "Curve":
        """Return the part up to a step."""
        train, evaluated = ([p for p in points if p[0] <= step] for points in (self.train, self.evaluated))
        return replace(self, train=train, evaluated=evaluated)


def curve_of(rows: Sequence[Mapping[str, Any]], evaluation: str = "held-out") -> Curve:
    """Return the curve from lines of `metrics.jsonl`."""
    curve = Curve(evaluation=evaluation)
    for row in rows:
        for key, points in ((TRAIN_KEY, curve.train), ("eval/mean_reward", curve.evaluated)):
            if row.get(key) is not None:
                points.append((row["step"], row[key]))
    return curve


def as_text(curve: Curve) -> str:
    """Draw the curve as text; empty if there are no points."""
    if not (curve.train or curve.evaluated):
        return ""
    plotext = importlib.import_module("plotext")
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(76, 16)
    plotext.ylim(*span(curve))
    if curve.train:
        plotext.plot(*_columns(curve.train), label="training trials", marker="braille")
    if curve.evaluated:
        plotext.scatter(*_columns(curve.evaluated), label=f"{curve.evaluation} tasks", marker="●")
    plotext.title("mean reward by step")
    text = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_png(curve: Curve, path: Path, title: str) -> None:
    """Write the curve as a PNG; no file if there are no points."""
    if not (curve.train or curve.evaluated):
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="mean reward", ylim=span(curve, margin=0.02), title=title)
    if curve.train:
        axes.plot(*_columns(curve.train), label="training trials", color="#4878a8", alpha=0.8)
    if curve.evaluated:
        axes.plot(*_columns(curve.evaluated), "o--", label=f"{curve.evaluation} tasks", color="#c44e52")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    FigureCanvasAgg(figure).print_png(str(path))


def span(curve: Curve, margin: float = 0.0) -> tuple[float, float]:
    """Return the range of the reward axis: 0 to 1, extended to all values.

    Example:
        >>> span(Curve(train=[(1, -2.0)]))
        (-2.0, 1.0)
    """
    values = [value for _, value in (*curve.train, *curve.evaluated)]
    low, high = min(0.0, *values), max(1.0, *values)
    return low - margin * (high - low), high + margin * (high - low)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
