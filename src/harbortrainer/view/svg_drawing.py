"""The few marks that our charts are made of, as SVG. Colours are classes of the stylesheet: both themes fit.

Contract: every number is written with two decimals at most, every text is escaped; what comes back is safe to put into
a page. Pure.
"""

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from harbortrainer.view.hostile_text import visible

type Point = tuple[float, float]


def number(value: float) -> str:
    """A coordinate."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def element(name: str, content: str = "", **attributes: object) -> Markup:
    """One element; `class_` is class, an underline within a name a hyphen. None leaves an attribute out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_written(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = content if isinstance(content, Markup) else escape(visible(content))
    return Markup(f"<{name}{said}>{inner}</{name}>")


def _written(value: object) -> str:
    return number(value) if isinstance(value, float) else visible(str(value))


def joined(parts: Iterable[Markup]) -> Markup:
    """Elements one after the other."""
    return Markup("").join(parts)


def titled(name: str, title: str, **attributes: object) -> Markup:
    """An element that says `title` when it is pointed at."""
    return element(name, element("title", title), **attributes)


def path_through(points: Sequence[Point]) -> str:
    """The `d` of a line through points."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def drawing(content: Markup, width: float, height: float, label: str, class_: str = "chart") -> Markup:
    """A whole picture that scales with the room it has; `label` is for those who do not see it."""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", content, viewBox=box, role="img", aria_label=label, class_=class_)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from `low` to `high`, about so many.

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


def short(value: float) -> str:
    """A number for people: three digits that count, k and M for large ones.

    Example:
        >>> [short(value) for value in (0.0, 0.01234, 12.0, 123456.0, 2.5e6)]
        ['0', '0.0123', '12', '123k', '2.5M']
    """
    if not math.isfinite(value):
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1000.0 if unit == 'k' else size):.3g}{unit}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
