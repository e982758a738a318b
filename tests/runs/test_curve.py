"""The reward curve."""

import re

import pytest

from harbortrainer.runs.curve import TRAIN_KEY, as_png, as_text, curve_of, span
from harbortrainer.runs.memory import PeakMemory

ROWS = [
    {"step": 0, "eval/mean_reward": 0.2, "eval/n": 4},
    {"step": 1, TRAIN_KEY: 0.25, "loss": 0.1},
    {"step": 2, TRAIN_KEY: None, "loss": 0.1},
    {"step": 2, "eval/mean_reward": 0.8},
]


def test_curve_has_train_and_held_out_points():
    curve = curve_of(ROWS)
    assert curve.train == [(1, 0.25)]
    assert curve.evaluated == [(0, 0.2), (2, 0.8)]


def test_curve_as_text():
    text = as_text(curve_of(ROWS))
    assert "held-out tasks" in text
    assert "held-out" not in as_text(curve_of(ROWS, "evaluation"))
    assert "\x1b" not in text


@pytest.mark.process  # matplotlib runs fc-list on a machine's first use
def test_curve_as_png(tmp_path):
    path = tmp_path / "reward.png"
    as_png(curve_of(ROWS), path, "run")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("rewards", "shown"), [([-3.5, 0.2], (-3.5, 1.0)), ([7.0], (0.0, 7.0)), ([0.5], (0.0, 1.0))])
def test_axis_includes_every_finite_reward(rewards, shown):
    curve = curve_of([{"step": step, TRAIN_KEY: reward} for step, reward in enumerate(rewards)])
    assert span(curve) == shown
    ticks = [float(number) for number in re.findall(r"^ *(-?\d+\.\d+)┤", as_text(curve), flags=re.MULTILINE)]
    assert (min(ticks), max(ticks)) == shown


def test_empty_curve_is_not_drawn(tmp_path):
    assert as_text(curve_of([])) == ""
    as_png(curve_of([]), tmp_path / "none.png", "run")
    assert not (tmp_path / "none.png").exists()


def test_peak_memory_is_at_least_that_of_this_process():
    with PeakMemory() as memory:
        memory.sample()
    assert memory.peak_mb > 10
