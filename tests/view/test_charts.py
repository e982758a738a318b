"""Charts, text formatting and token markup."""

import re

import pytest

from harbortrainer.view.charts import (
    MAX_POINTS,
    Mark,
    Part,
    Series,
    downsampled,
    element,
    line_chart,
    split_bar,
    stacked_columns,
    ticks,
)
from harbortrainer.view.format import clip, escape_invisible
from harbortrainer.view.trial_page import token_marks
from harbortrainer.view.trial_view import TokenView


def coordinates(svg: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf' {name}="([^"]+)"', svg)]


def test_higher_values_are_drawn_higher_and_inside_the_chart() -> None:
    svg = line_chart([Series("s", "heldout", [Mark(0, 0.2), Mark(1, 3.0), Mark(2, -1.0)], dots=True)], label="x")
    heights = coordinates(svg, "cy")
    assert heights[1] < heights[0] < heights[2]
    assert min(heights) >= 0 and max(heights) <= 260


def test_downsampling_keeps_the_mean() -> None:
    marks = [Mark(step, step % 7) for step in range(5000)]
    kept = downsampled(marks)
    assert len(kept) <= MAX_POINTS
    mean = sum(mark.value for mark in marks) / 5000
    assert sum(mark.value for mark in kept) / len(kept) == pytest.approx(mean, abs=0.05)


def test_split_bar_widths_match_shares() -> None:
    svg = split_bar([Part("a", "x", 3.0), Part("b", "y", 1.0)], label="l", width=100)
    assert coordinates(svg, "x") == [0.0, 75.0]
    assert "a: 75.0%" in svg


def test_stacked_columns_are_merged_to_stay_within_maximum() -> None:
    columns = [(float(step), [Part("a", "x", 1), Part("b", "y", 3)]) for step in range(1000)]
    svg = stacked_columns(columns, label="l")
    assert svg.count("<rect") == 2 * 77
    assert "steps 0 to 12, b: 39 of 52" in svg


@pytest.mark.parametrize("svg", [line_chart([], label="x"), split_bar([], label="x"), stacked_columns([], label="x")])
def test_charts_without_data_are_empty(svg: str) -> None:
    assert svg == ""


def test_ticks_lie_within_their_range() -> None:
    for low, high in ((0.0, 1.0), (-3.2, 17.0), (1e-9, 2e-9), (5.0, 5.0), (0.0, float("inf"))):
        assert all(low <= tick <= high for tick in ticks(low, high))


def test_element_escapes_attributes_and_text() -> None:
    assert element("a", "<b>", title='"><script>') == '<a title="&#34;&gt;&lt;script&gt;">&lt;b&gt;</a>'


@pytest.mark.parametrize(
    "code_point", [*range(0x20), 0x7F, 0x85, 0xAD, 0x200B, 0x202E, 0x2066, 0xFEFF, 0xD800, 0xE0001]
)
def test_invisible_characters_are_replaced(code_point: int) -> None:
    text = escape_invisible(f"a{chr(code_point)}b")
    assert text in ("a\nb", "a\tb") or (len(text) > 2 and chr(code_point) not in text)
    text.encode()


def test_letters_of_every_script_are_unchanged() -> None:
    text = "größe – 你好 мир שלום こんにちは ✓ │ └── 🙂 é"
    assert escape_invisible(text) == text


def test_clip_counts_omitted_characters() -> None:
    assert clip("x" * 10, 4).omitted == 6 and clip("x" * 10, 4).text == "xxxx"


def test_token_markup_has_colour_numbers_and_mask() -> None:
    marks = token_marks(
        [
            TokenView("ls", logprob=-0.01, advantage=0.5, trains=True, token_id=7),
            TokenView("<x>\n", logprob=-9.0, advantage=0.5, trains=False, beyond_seq_len=True, token_id=8),
        ]
    )
    first, second = re.findall(r'<span class="([^"]+)" title="([^"]+)">', marks)
    assert first == ("t p0", "log-probability -0.01 (p 0.99), advantage +0.5, id 7")
    assert second[0] == "t p6 untrained" and "not trained on" in second[1] and "advantage" not in second[1]
    assert "&lt;x&gt;" in marks and "<x>" not in marks


def test_untrained_token_has_no_advantage_colour() -> None:
    tokens = [TokenView("a", -1.0, value, trains) for value, trains in ((1.0, True), (-1.0, True), (1.0, False))]
    assert re.findall(r'class="t (\w+)', token_marks(tokens, colour="advantage")) == ["up", "down", "a0"]
