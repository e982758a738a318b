"""SVG charts of the pages: line charts with intervals, stacked columns, split bars and sparklines.

Contract: a chart without data is an empty string. A curve with more than `MAX_POINTS` points shows means of
neighbours. All text is escaped, so the SVG is safe in a page. Colours are style classes, for both themes. Pure.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from markupsafe import Markup, escape

from harbortrainer.view.format import escape_invisible

type Point = tuple[float, float]


def coordinate(value: float) -> str:
    """Format a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def element(name: str, content: str = "", **attributes: object) -> Markup:
    """Return one element; `class_` sets class, `_` in a name becomes `-`, and an attribute of None is omitted."""
    rendered = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = content if isinstance(content, Markup) else escape(escape_invisible(content))
    return Markup(f"<{name}{rendered}>{inner}</{name}>")


def _attribute_text(value: object) -> str:
    return coordinate(value) if isinstance(value, float) else escape_invisible(str(value))


def joined(parts: Iterable[Markup]) -> Markup:
    """Concatenate elements."""
    return Markup("").join(parts)


def with_tooltip(name: str, title: str, **attributes: object) -> Markup:
    """Return an element with a tooltip."""
    return element(name, element("title", title), **attributes)


def path_through(points: Sequence[Point]) -> str:
    """Return the `d` attribute of a line through points."""
    return "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in points)


def svg_image(content: Markup, width: float, height: float, label: str, class_: str = "chart") -> Markup:
    """Return an SVG that scales with its container; `label` is for screen readers."""
    box = f"0 0 {coordinate(width)} {coordinate(height)}"
    return element("svg", content, viewBox=box, role="img", aria_label=label, class_=class_)


NARROW = 360.0
"""Width of the charts for narrow windows."""


def for_both_widths(draw: Callable[[float], Markup], wide: float) -> Markup:
    """Return two charts, for wide and for narrow windows. The style sheet shows one of them.

    Scaling one chart to both would make its labels illegible in a narrow window.
    """
    return joined(
        element("div", drawn, class_=name)
        for name, width in (("chart-wide", wide), ("chart-narrow", NARROW))
        if (drawn := draw(width))
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round values from `low` to `high`.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1.0, 2.0, 5.0, 10.0) if scale * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short_number(value: float) -> str:
    """Format a number with three significant digits, and k, M or G for large ones.

    Example:
        >>> [short_number(value) for value in (0.0, 0.01234, 12.0, 999.7, 123456.0, 999700.0, 2.5e6)]
        ['0', '0.0123', '12', '1000', '123k', '1M', '2.5M']
    """
    if not math.isfinite(value):
        return "–"
    value = float(f"{value:.3g}") if abs(value) >= 1e4 else value  # 999700 is 1M, not 1000k
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000.0 if unit == 'k' else size):.3g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


MAX_POINTS = 240
MAX_COLUMNS = 80
LEFT, RIGHT, TOP, BOTTOM = 44.0, 12.0, 10.0, 26.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One value at a step, with its interval."""

    step: float
    value: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. `style` is its style class."""

    name: str
    style: str
    marks: Sequence[Mark]
    dots: bool = False
    """Whether to draw dots with whiskers and a thin line, for values that are measured rarely."""


@dataclass(slots=True)
class Frame:
    """Mapping from values to coordinates, and the parts drawn so far."""

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
        """Return the coordinates of a value."""
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        inner = self.width - self.left - self.right, self.height - self.top - self.bottom
        return self.left + across * inner[0], self.top + (1 - up) * inner[1]

    def axes(self) -> None:
        """Draw grid lines at round values and step labels below."""
        for value in ticks(*self.y):
            x, y = self.at(self.x[0], value)
            self.parts.append(element("line", x1=x, x2=self.width - self.right, y1=y, y2=y, class_="grid"))
            self.parts.append(element("text", short_number(value), x=x - 8, y=y + 3.5, class_="tick end"))
        for value in (tick for tick in ticks(*self.x, about=8 if self.width > NARROW else 5) if tick == int(tick)):
            x, _ = self.at(value, self.y[0])
            self.parts.append(element("text", short_number(value), x=x, y=self.height - 8, class_="tick mid"))


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    width: float = 720,
    height: float = 260,
) -> Markup:
    """Return a chart of curves over steps. The y axis covers at least 0 to 1."""
    kept = [Series(one.name, one.style, downsampled(one.marks), one.dots) for one in series if one.marks]
    marks = [mark for one in kept for mark in one.marks]
    if not marks:
        return Markup("")
    ends = [end for mark in marks for end in (mark.value, mark.low, mark.high) if end is not None]
    low, high = min(*ends, 0.0), max(*ends, 1.0)
    pad = 0.05 * (high - low)
    steps = [mark.step for mark in marks]
    bounds = (low - (pad if low < 0 else 0), high + (pad if high > 1 else 0))
    frame = Frame(width, height, (min(steps), max(steps)), bounds)
    if min(steps) == max(steps):
        frame.x = (min(steps) - 1, max(steps) + 1)
    frame.axes()
    for one in kept:
        (_dots if one.dots else _curve)(frame, one)
    return svg_image(joined(frame.parts), width, height, label)


def downsampled(marks: Sequence[Mark], limit: int = MAX_POINTS) -> Sequence[Mark]:
    """Reduce to at most `limit` marks, each the mean of neighbours."""
    if len(marks) <= limit:
        return marks
    size = -(-len(marks) // limit)
    chunks = [marks[start : start + size] for start in range(0, len(marks), size)]
    return [
        Mark(
            step=fmean(mark.step for mark in chunk),
            value=fmean(mark.value for mark in chunk),
            low=_mean_of([mark.low for mark in chunk]),
            high=_mean_of([mark.high for mark in chunk]),
            title=f"steps {chunk[0].step:g} to {chunk[-1].step:g}: {short_number(fmean(mark.value for mark in chunk))}",
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
        hover = with_tooltip("circle", _tooltip(one, mark), cx=x, cy=y, r=6.0, class_="hover")
        frame.parts += [dot, hover]


def _dots(frame: Frame, one: Series) -> None:
    points = [frame.at(mark.step, mark.value) for mark in one.marks]
    frame.parts.append(element("path", d=path_through(points), class_=f"thin {one.style}"))
    for (x, y), mark in zip(points, one.marks, strict=True):
        if mark.low is not None and mark.high is not None:
            (_, low), (_, high) = frame.at(mark.step, mark.low), frame.at(mark.step, mark.high)
            frame.parts.append(element("line", x1=x, x2=x, y1=low, y2=high, class_=f"whisker {one.style}"))
        frame.parts.append(with_tooltip("circle", _tooltip(one, mark), cx=x, cy=y, r=4.5, class_=f"big {one.style}"))


def _tooltip(one: Series, mark: Mark) -> str:
    return mark.title or f"{one.name}, step {mark.step:g}: {short_number(mark.value)}"


def sparkline(marks: Sequence[Mark], label: str) -> Markup:
    """Return a small curve without axes."""
    width, height = 220.0, 44.0
    kept = downsampled(marks, 110)
    if not kept:
        return Markup("")
    values = [mark.value for mark in kept]
    low, high = min(values), max(values)
    steps = (kept[0].step, kept[-1].step if len(kept) > 1 else kept[0].step + 1)
    span = (low, high) if high > low else (low - 1, high + 1)
    frame = Frame(width, height, steps, span, left=4, bottom=6, top=6, right=6)
    points = [frame.at(mark.step, mark.value) for mark in kept]
    end = element("circle", cx=points[-1][0], cy=points[-1][1], r=2.6, class_="dot train")
    return svg_image(element("path", d=path_through(points), class_="curve train") + end, width, height, label, "spark")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole."""

    name: str
    style: str
    amount: float


def split_bar(parts: Sequence[Part], *, label: str, width: float = 720, height: float = 22) -> Markup:
    """Return one bar, split by share."""
    whole = sum(part.amount for part in parts)
    if whole <= 0:
        return Markup("")
    left, out = 0.0, []
    for part in parts:
        own = width * part.amount / whole
        title = f"{part.name}: {100 * part.amount / whole:.1f}%"
        out.append(
            with_tooltip("rect", title, x=left, y=0.0, width=max(0.0, own - 1.5), height=height, class_=part.style)
        )
        left += own
    return svg_image(joined(out), width, height, label, "bar")


def stacked_columns(
    columns: Sequence[tuple[float, Sequence[Part]]], *, label: str, width: float = 720, height: float = 180
) -> Markup:
    """Return one full-height column of shares per step; many steps are merged into one column."""
    whole = [(step, parts) for step, parts in columns if sum(part.amount for part in parts) > 0]
    if not whole:
        return Markup("")
    size = -(-len(whole) // MAX_COLUMNS)
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
            frame.parts.append(element("text", short_number(group[0][0]), x=x, y=height - 8, class_="tick mid"))
    return svg_image(joined(frame.parts), width, height, label)


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
        title = f"{steps}, {name}: {coordinate(amount)} of {coordinate(whole)}"
        wide = max(0.5, min(end - x - 1.5, 48.0))
        box = {"x": (x + end - wide) / 2, "y": top, "width": wide, "height": max(0.0, bottom - top)}
        frame.parts.append(with_tooltip("rect", title, **box, class_=style))
        low += share
