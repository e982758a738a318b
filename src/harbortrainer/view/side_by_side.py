"""Comparison of what the trials of a group did, turn by turn.

Contract: turns are aligned by number. Trials with the same commands are one variant, and the words in which a variant
differs from the first one of its turn are marked. All text is escaped. Pure.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import fmean

from markupsafe import Markup

from harbortrainer.view.agent_actions import actions_of
from harbortrainer.view.charts import element, joined
from harbortrainer.view.format import clip
from harbortrainer.view.trial_view import TrialDetail, TurnDetail, training_summary

MAX_TURNS = 20
MAX_CHARACTERS = 1500
"""Most characters of a variant."""
MAX_WORD_PAIRS = 40_000
"""Most pairs of words that are compared; longer variants are compared line by line."""
_WORDS = re.compile(r"\s+|[\w.-]+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class GroupTrial:
    """A trial of the group."""

    number: int
    """Number in the group, from 1, in the order in which the trials ended."""
    detail: TrialDetail
    summary: str
    """Why it was or was not trained on."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What one or more trials did in a turn."""

    trials: Sequence[GroupTrial]
    text: Markup
    """The commands, or the answer if it has none; words that the first variant lacks are marked."""
    complete: bool
    """Whether the trials declared the task complete."""
    omitted: int
    """Number of characters that are not shown."""


@dataclass(frozen=True, slots=True)
class SideTurn:
    """One turn of every trial."""

    number: int
    variants: Sequence[Variant]
    """The one of the trial with the highest reward first."""
    ended: Sequence[GroupTrial]
    """Trials that had ended before."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Values of the template of a group's page."""

    trials: Sequence[GroupTrial]
    """Ordered by reward, highest first."""
    mean: float | None
    turns: Sequence[SideTurn]
    omitted: int
    """Turns of the longest trial that are not shown."""
    reward_names: Sequence[str]
    """Keys of the verifier's rewards other than `reward`."""


def side_by_side(trials: Sequence[TrialDetail]) -> SideBySide:
    """Compare the trials of one group; their order gives their numbers."""
    rewards = [detail.row.reward for detail in trials if detail.row.reward is not None]
    mean = fmean(rewards) if rewards else None
    numbered = [GroupTrial(number, one, training_summary(one.row, mean)) for number, one in enumerate(trials, 1)]
    ordered = sorted(numbered, key=lambda one: (one.detail.row.reward is None, -(one.detail.row.reward or 0.0)))
    longest = max((len(detail.turns) for detail in trials), default=0)
    return SideBySide(
        trials=ordered,
        mean=mean,
        turns=[_turn(ordered, number) for number in range(min(longest, MAX_TURNS))],
        omitted=max(0, longest - MAX_TURNS),
        reward_names=sorted({name for detail in trials for name in (detail.row.rewards or {}) if name != "reward"}),
    )


def _turn(trials: Sequence[GroupTrial], number: int) -> SideTurn:
    variants: dict[tuple[str, bool], list[GroupTrial]] = {}
    for one in trials:
        if number < len(one.detail.turns):
            variants.setdefault(what_it_did(one.detail.turns[number]), []).append(one)
    first = next(iter(variants), ("", False))[0]
    return SideTurn(
        number + 1,
        [_variant(own, text, first, complete=complete) for (text, complete), own in variants.items()],
        [one for one in trials if number >= len(one.detail.turns)],
    )


def what_it_did(turn: TurnDetail) -> tuple[str, bool]:
    """Return the commands of a turn, and whether it declares the task complete; the answer if its format is unknown."""
    actions = actions_of(turn.answer, turn.calls, plain=turn.plain, cut=turn.finish == "length")
    if actions is None:
        return turn.answer, False
    return "\n".join(command.rstrip("\n") for command in actions.commands), actions.complete


def _variant(trials: Sequence[GroupTrial], text: str, first: str, *, complete: bool) -> Variant:
    shown = clip(text, MAX_CHARACTERS)
    return Variant(trials, marked_words(shown.text, clip(first, MAX_CHARACTERS).text), complete, shown.omitted)


def marked_words(text: str, other: str) -> Markup:
    """Return a text in which the words that `other` lacks at that place are marked.

    Example:
        >>> str(marked_words("sort a > b", "sort -r a > b"))
        'sort a &gt; b'
        >>> str(marked_words("sort c", "sort a"))
        'sort <mark>c</mark>'
    """
    words, others = _WORDS.findall(text), _WORDS.findall(other)
    if len(words) * len(others) > MAX_WORD_PAIRS:
        words, others = text.splitlines(keepends=True), other.splitlines(keepends=True)
    matcher = SequenceMatcher(None, others, words, autojunk=False)
    return joined(_part("".join(words[start:end]), tag) for tag, _, _, start, end in matcher.get_opcodes())


def _part(text: str, tag: str) -> Markup:
    return Markup("{}").format(text) if tag == "equal" or not text.strip() else element("mark", text)
