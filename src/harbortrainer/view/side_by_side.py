"""A group side by side: the same task, the same policy, and what made the difference.

Contract: turns stand beside each other by number; an answer that another trial gave before it is said once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from harbortrainer.view.hostile_text import ShownText, shown
from harbortrainer.view.shown_trial import TrialSheet, trial_fate

MOST_TURNS = 20
MOST_CHARACTERS = 1500
"""Of an answer, here."""


@dataclass(frozen=True, slots=True)
class SideTurn:
    """One turn of every trial; None where a trial had ended before."""

    number: int
    answers: Sequence[ShownText | None]
    as_before: Sequence[int | None]
    """For each trial the first one, by its place, that had said the same; None for who said it first."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A group."""

    sheets: Sequence[TrialSheet]
    """From the best reward to the worst."""
    fates: Sequence[str]
    mean: float | None
    turns: Sequence[SideTurn]
    left_out: int
    """Turns beyond those shown, of the longest trial."""
    reward_names: Sequence[str]
    """Entries of the verifier's dictionaries beside the reward itself."""


def side_by_side(sheets: Sequence[TrialSheet]) -> SideBySide:
    """The trials of one group."""
    ordered = sorted(sheets, key=lambda sheet: (sheet.line.reward is None, -(sheet.line.reward or 0.0)))
    rewards = [sheet.line.reward for sheet in ordered if sheet.line.reward is not None]
    mean = fmean(rewards) if rewards else None
    longest = max((len(sheet.turns) for sheet in ordered), default=0)
    return SideBySide(
        sheets=ordered,
        fates=[trial_fate(sheet.line, mean) for sheet in ordered],
        mean=mean,
        turns=[_turn(ordered, number) for number in range(min(longest, MOST_TURNS))],
        left_out=max(0, longest - MOST_TURNS),
        reward_names=sorted({name for sheet in ordered for name in sheet.rewards if name != "reward"}),
    )


def _turn(sheets: Sequence[TrialSheet], number: int) -> SideTurn:
    said = [sheet.turns[number].answer if number < len(sheet.turns) else None for sheet in sheets]
    answers = [None if text is None else shown(text, MOST_CHARACTERS) for text in said]
    as_before = [
        None if text is None or said.index(text) == place else said.index(text) for place, text in enumerate(said)
    ]
    return SideTurn(number + 1, answers, as_before)
