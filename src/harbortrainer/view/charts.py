"""The charts of the pages: curves by step with their intervals, shares by step, one bar cut into parts.

Contract: data in, SVG out, made here; a chart of nothing is an empty string, so that a page can say so. What is
drawn is at most `MOST_POINTS` points wide: longer curves show the mean of neighbours. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from markupsafe import Markup

from harbortrainer.view.svg_drawing import Point, drawing, element, joined, number, path_through, short, ticks, titled

MOST_POINTS = 240
MOST_COLUMNS = 80
LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 10.0, 26.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One value at a step, and how sure it is."""

    step: float
    value: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `style` is its class in the stylesheet."""

    name: str
    style: str
    marks: Sequence[Mark]
    dots: bool = False
    """Dots with whiskers, joined by a thin line, for what is measured now and then."""


@dataclass(slots=True)
class Frame:
    """From values to places on the picture."""

    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    left: float = LEFT
    bottom: float = BOTTOM
    top: float = TOP
    right: float = RIGHT
    parts: list[Markup] = field(default_factory=list)

    def at(self, x: float, y: float) -> Point:
        """Where a value lies."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        inner = self.width - self.left - self.right, self.height - self.top - self.bottom
        return self.left + across * inner[0], self.top + (1 - up) * inner[1]

    def axes(self) -> None:
        """Lines across at round values, steps below."""
        for value in ticks(*self.y):
            x, y = self.at(self.x[0], value)
            self.parts.append(element("line", x1=x, x2=self.width - self.right, y1=y, y2=y, class_="grid"))
            self.parts.append(element("text", short(value), x=x - 8, y=y + 3.5, class_="tick end"))
        for value in (tick for tick in ticks(*self.x, about=8) if tick == int(tick)):
            x, _ = self.at(value, self.y[0])
            self.parts.append(element("text", short(value), x=x, y=self.height - 8, class_="tick mid"))


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    y: tuple[float, float] | None = None,
    width: float = 720,
    height: float = 260,
) -> Markup:
    """Curves over steps. `y` is shown at least; values beyond it widen it."""
    kept = [Series(one.name, one.style, thinned(one.marks), one.dots) for one in series if one.marks]
    marks = [mark for one in kept for mark in one.marks]
    if not marks:
        return Markup("")
    ends = [end for mark in marks for end in (mark.value, mark.low, mark.high) if end is not None]
    low, high = min([*ends, *(y or ())]), max([*ends, *(y or ())])
    pad = 0.0 if y and (low, high) == y else 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    steps = [mark.step for mark in marks]
    bounds = (low - (pad if low < (y or (high, 0))[0] else 0), high + (pad if high > (y or (0, low))[1] else 0))
    frame = Frame(width, height, (min(steps), max(steps)), bounds)
    if min(steps) == max(steps):
        frame.x = (min(steps) - 1, max(steps) + 1)
    frame.axes()
    for one in kept:
        (_dots if one.dots else _curve)(frame, one)
    return drawing(joined(frame.parts), width, height, label)


def thinned(marks: Sequence[Mark], most: int = MOST_POINTS) -> Sequence[Mark]:
    """At most so many marks, each the mean of neighbours."""
    if len(marks) <= most:
        return marks
    size = -(-len(marks) // most)
    chunks = [marks[start : start + size] for start in range(0, len(marks), size)]
    return [
        Mark(
            step=fmean(mark.step for mark in chunk),
            value=fmean(mark.value for mark in chunk),
            low=_mean_of([mark.low for mark in chunk]),
            high=_mean_of([mark.high for mark in chunk]),
            title=f"steps {chunk[0].step:g} to {chunk[-1].step:g}: {short(fmean(mark.value for mark in chunk))}",
        )
        for chunk in chunks
    ]


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _curve(frame: Frame, one: Series) -> None:
    band = [mark for mark in one.marks if mark.low is not None and mark.high is not None]
    if len(band) > 1:
        upper = [frame.at(mark.step, mark.high or 0.0) for mark in band]
        lower = [frame.at(mark.step, mark.low or 0.0) for mark in reversed(band)]
        frame.parts.append(element("path", d=path_through([*upper, *lower]) + "Z", class_=f"band {one.style}"))
    points = [frame.at(mark.step, mark.value) for mark in one.marks]
    frame.parts.append(element("path", d=path_through(points), class_=f"curve {one.style}"))
    radius = 2.2 if len(points) <= 60 else 0.0
    for (x, y), mark in zip(points, one.marks, strict=True):
        dot = element("circle", cx=x, cy=y, r=radius, class_=f"dot {one.style}") if radius else Markup("")
        hover = titled("circle", _said(one, mark), cx=x, cy=y, r=6.0, class_="hover")
        frame.parts += [dot, hover]


def _dots(frame: Frame, one: Series) -> None:
    points = [frame.at(mark.step, mark.value) for mark in one.marks]
    frame.parts.append(element("path", d=path_through(points), class_=f"thin {one.style}"))
    for (x, y), mark in zip(points, one.marks, strict=True):
        if mark.low is not None and mark.high is not None:
            (_, low), (_, high) = frame.at(mark.step, mark.low), frame.at(mark.step, mark.high)
            frame.parts.append(element("line", x1=x, x2=x, y1=low, y2=high, class_=f"whisker {one.style}"))
        frame.parts.append(titled("circle", _said(one, mark), cx=x, cy=y, r=4.5, class_=f"big {one.style}"))


def _said(one: Series, mark: Mark) -> str:
    return mark.title or f"{one.name}, step {mark.step:g}: {short(mark.value)}"


def spark(marks: Sequence[Mark], label: str, width: float = 220, height: float = 44) -> Markup:
    """A small curve without axes."""
    kept = thinned(marks, 110)
    if not kept:
        return Markup("")
    values = [mark.value for mark in kept]
    low, high = min(values), max(values)
    steps = (kept[0].step, kept[-1].step if len(kept) > 1 else kept[0].step + 1)
    span = (low, high) if high > low else (low - 1, high + 1)
    frame = Frame(width, height, steps, span, left=4, bottom=6, top=6, right=6)
    points = [frame.at(mark.step, mark.value) for mark in kept]
    end = element("circle", cx=points[-1][0], cy=points[-1][1], r=2.6, class_="dot train")
    return drawing(element("path", d=path_through(points), class_="curve train") + end, width, height, label, "spark")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole."""

    name: str
    style: str
    amount: float


def split_bar(parts: Sequence[Part], *, label: str, width: float = 720, height: float = 22) -> Markup:
    """One bar, cut by share."""
    whole = sum(part.amount for part in parts)
    if whole <= 0:
        return Markup("")
    left, out = 0.0, []
    for part in parts:
        own = width * part.amount / whole
        title = f"{part.name}: {100 * part.amount / whole:.1f} %"
        out.append(titled("rect", title, x=left, y=0.0, width=max(0.0, own - 1.5), height=height, class_=part.style))
        left += own
    return drawing(joined(out), width, height, label, "bar")


def stacked_columns(
    columns: Sequence[tuple[float, Sequence[Part]]], *, label: str, width: float = 720, height: float = 180
) -> Markup:
    """Shares by step, each column a whole; many steps are put together."""
    whole = [(step, parts) for step, parts in columns if sum(part.amount for part in parts) > 0]
    if not whole:
        return Markup("")
    size = -(-len(whole) // MOST_COLUMNS)
    groups = [whole[start : start + size] for start in range(0, len(whole), size)]
    frame = Frame(width, height, (0.0, float(len(groups))), (0.0, 1.0))
    frame.parts += [
        element("text", f"{share:.0%}", x=LEFT - 8, y=frame.at(0, share)[1] + 3.5, class_="tick end")
        for share in (0.0, 0.5, 1.0)
    ]
    for index, group in enumerate(groups):
        _column(frame, index, group)
        if index % (-(-len(groups) // 12)) == 0:
            x = frame.at(index + 0.5, 0)[0]
            frame.parts.append(element("text", short(group[0][0]), x=x, y=height - 8, class_="tick mid"))
    return drawing(joined(frame.parts), width, height, label)


def _column(frame: Frame, index: int, group: Sequence[tuple[float, Sequence[Part]]]) -> None:
    amounts: dict[tuple[str, str], float] = {}
    for _, parts in group:
        for part in parts:
            amounts[part.name, part.style] = amounts.get((part.name, part.style), 0.0) + part.amount
    whole, low = sum(amounts.values()), 0.0
    steps = f"step {group[0][0]:g}" if len(group) == 1 else f"steps {group[0][0]:g} to {group[-1][0]:g}"
    (x, _), (end, _) = frame.at(index, 0), frame.at(index + 1, 0)
    for (name, style), amount in amounts.items():
        share = amount / whole
        (_, bottom), (_, top) = frame.at(0, low), frame.at(0, low + share)
        title = f"{steps}, {name}: {number(amount)} of {number(whole)}"
        wide = max(0.5, min(end - x - 1.5, 48.0))
        box = {"x": (x + end - wide) / 2, "y": top, "width": wide, "height": max(0.0, bottom - top)}
        frame.parts.append(titled("rect", title, **box, class_=style))
        low += share
