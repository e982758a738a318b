"""Comparison of the trials of a group, turn by turn.

Contract: turns are aligned by number. An answer that several trials share is shown once, for the first of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from harbortrainer.view.format import ClippedText, clip
from harbortrainer.view.trial_view import TrialDetail, training_summary

MAX_TURNS = 20
MAX_CHARACTERS = 1500
"""Most characters of an answer in the comparison."""


@dataclass(frozen=True, slots=True)
class SideTurn:
    """One turn of every trial; None for a trial that has fewer turns."""

    number: int
    answers: Sequence[ClippedText | None]
    same_as: Sequence[int | None]
    """Per trial, the index of the first trial with the same answer; None for that first trial."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Values of the template of a group's page."""

    trials: Sequence[TrialDetail]
    """Ordered by reward, highest first."""
    summaries: Sequence[str]
    """Per trial, why it was or was not trained on."""
    mean: float | None
    turns: Sequence[SideTurn]
    omitted: int
    """Turns of the longest trial that are not shown."""
    reward_names: Sequence[str]
    """Keys of the verifier's rewards other than `reward`."""


def side_by_side(trials: Sequence[TrialDetail]) -> SideBySide:
    """Compare the trials of one group."""
    ordered = sorted(trials, key=lambda detail: (detail.row.reward is None, -(detail.row.reward or 0.0)))
    rewards = [detail.row.reward for detail in ordered if detail.row.reward is not None]
    mean = fmean(rewards) if rewards else None
    longest = max((len(detail.turns) for detail in ordered), default=0)
    return SideBySide(
        trials=ordered,
        summaries=[training_summary(detail.row, mean) for detail in ordered],
        mean=mean,
        turns=[_turn(ordered, number) for number in range(min(longest, MAX_TURNS))],
        omitted=max(0, longest - MAX_TURNS),
        reward_names=sorted({name for detail in ordered for name in (detail.row.rewards or {}) if name != "reward"}),
    )


def _turn(trials: Sequence[TrialDetail], number: int) -> SideTurn:
    texts = [detail.turns[number].answer if number < len(detail.turns) else None for detail in trials]
    answers = [None if text is None else clip(text, MAX_CHARACTERS) for text in texts]
    same_as = [
        None if text is None or texts.index(text) == index else texts.index(text) for index, text in enumerate(texts)
    ]
    return SideTurn(number + 1, answers, same_as)
