"""Contrast of text in both themes: at least 4.5 to 1, as WCAG AA requires."""

import re

import pytest

from harbortrainer.view.pages import asset

TEXT = ("ink", "soft", "faint", "accent", "good", "bad", "warn")
GROUNDS = ("page", "panel", "raised")
TOKENS = [f"p{level}" for level in range(1, 7)] + ["up", "down"]


def themes() -> dict[str, dict[str, str]]:
    """Return the colours of the light theme and of the two copies of the dark one."""
    found = re.findall(r"([^{}]*)\{([^{}]*--page: [^{}]*)\}", asset("style.css"))
    names = ("light", "dark of the system", "dark by choice")
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for name, (_, block) in zip(names, found, strict=True)
    }


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_both_copies_of_the_dark_theme_are_equal() -> None:
    assert themes()["dark of the system"] == themes()["dark by choice"]


@pytest.mark.parametrize("theme", ["light", "dark of the system"])
def test_text_has_enough_contrast(theme: str) -> None:
    colours = themes()[theme]
    pairs = [(text, ground) for text in TEXT for ground in GROUNDS]
    pairs += [("screen-ink", "screen"), *(("ink", ground) for ground in TOKENS)]
    pairs += [(f"heat-ink-{level}" if level >= 9 else "heat-ink", f"h{level}") for level in range(11)]
    weak = {pair: round(found, 2) for pair in pairs if (found := contrast(colours[pair[0]], colours[pair[1]])) < 4.5}
    assert weak == {}
