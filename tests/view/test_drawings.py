"""Charts and tokens: what is drawn is what is known, and no more of it than a page can hold."""

import re

import pytest

from harbortrainer.view.charts import MOST_POINTS, Mark, Part, Series, line_chart, split_bar, stacked_columns, thinned
from harbortrainer.view.hostile_text import shown, visible
from harbortrainer.view.shown_trial import ShownToken
from harbortrainer.view.svg_drawing import element, ticks
from harbortrainer.view.token_marks import token_marks


def coordinates(svg: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf' {name}="([^"]+)"', svg)]


def test_a_higher_value_is_drawn_higher_and_inside_the_picture() -> None:
    svg = line_chart([Series("s", "heldout", [Mark(0, 0.2), Mark(1, 3.0), Mark(2, -1.0)], dots=True)], label="x")
    heights = coordinates(svg, "cy")
    assert heights[1] < heights[0] < heights[2]
    assert min(heights) >= 0 and max(heights) <= 260


def test_a_long_curve_keeps_its_mean() -> None:
    marks = [Mark(step, step % 7) for step in range(5000)]
    few = thinned(marks)
    assert len(few) <= MOST_POINTS
    assert sum(mark.value for mark in few) / len(few) == pytest.approx(sum(m.value for m in marks) / 5000, abs=0.05)


def test_parts_have_their_share_of_the_bar() -> None:
    svg = split_bar([Part("a", "x", 3.0), Part("b", "y", 1.0)], label="l", width=100)
    assert coordinates(svg, "x") == [0.0, 75.0]
    assert "a: 75.0 %" in svg


def test_columns_are_at_most_so_many_and_still_whole() -> None:
    columns = [(float(step), [Part("a", "x", 1), Part("b", "y", 3)]) for step in range(1000)]
    svg = stacked_columns(columns, label="l")
    assert svg.count("<rect") == 2 * 77
    assert "steps 0 to 12, b: 39 of 52" in svg


@pytest.mark.parametrize(
    "nothing", [line_chart([], label="x"), split_bar([], label="x"), stacked_columns([], label="x")]
)
def test_nothing_is_drawn_of_nothing(nothing: str) -> None:
    assert nothing == ""


def test_round_values_lie_within_their_span() -> None:
    for low, high in ((0.0, 1.0), (-3.2, 17.0), (1e-9, 2e-9), (5.0, 5.0), (0.0, float("inf"))):
        assert all(low <= tick <= high for tick in ticks(low, high))


def test_no_attribute_and_no_text_leaves_its_element() -> None:
    assert element("a", "<b>", title='"><script>') == '<a title="&#34;&gt;&lt;script&gt;">&lt;b&gt;</a>'


@pytest.mark.parametrize("number", [*range(0x20), 0x7F, 0x85, 0xAD, 0x200B, 0x202E, 0x2066, 0xFEFF, 0xD800, 0xE0001])
def test_no_character_stays_unseen(number: int) -> None:
    text = visible(f"a{chr(number)}b")
    assert text in ("a\nb", "a\tb") or (len(text) > 2 and chr(number) not in text)
    text.encode()


def test_letters_of_every_script_stay_as_they_are() -> None:
    text = "größe – 你好 мир שלום こんにちは ✓ │ └── 🙂 é"
    assert visible(text) == text


def test_a_long_text_says_how_much_is_missing() -> None:
    assert shown("x" * 10, 4).left_out == 6 and shown("x" * 10, 4).text == "xxxx"


def test_a_token_has_its_colour_its_figures_and_its_mask() -> None:
    marks = token_marks(
        [
            ShownToken("ls", logprob=-0.01, advantage=0.5, trains=True, token_id=7),
            ShownToken("<x>\n", logprob=-9.0, advantage=0.5, trains=False, cut=True, token_id=8),
        ]
    )
    first, second = re.findall(r'<span class="([^"]+)" title="([^"]+)">', marks)
    assert first == ("t p0", "log-probability -0.01 (p 0.99), advantage +0.5, id 7")
    assert second[0] == "t p6 untrained" and "does not train" in second[1] and "advantage" not in second[1]
    assert "&lt;x&gt;" in marks and "<x>" not in marks


def test_by_advantage_a_token_that_does_not_train_has_no_colour() -> None:
    tokens = [ShownToken("a", -1.0, value, trains) for value, trains in ((1.0, True), (-1.0, True), (1.0, False))]
    assert re.findall(r'class="t (\w+)', token_marks(tokens, colour="advantage")) == ["up", "down", "a0"]
