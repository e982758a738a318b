"""A trial's page: what is shown of it, cut to what a page can hold."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

from harbortrainer.view.charts import Part, split_bar
from harbortrainer.view.hostile_text import ShownText, shown, visible
from harbortrainer.view.shown_trial import ShownTurn, TrialEntry, TrialSheet, trial_fate
from harbortrainer.view.time_spent import trial_seconds
from harbortrainer.view.token_marks import MOST_TOKENS, token_marks

TURNS = 12
"""On a page."""
SCREEN = "New Terminal Output:"
"""Before what the terminal shows, in Terminus-2's messages."""
_EMPTY = re.compile(r"\n(?:[ \t]*\n){4,}")


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """A message to the model."""

    role: str
    label: str
    """What it is, in words."""
    terminal: bool
    """Whether it is the terminal's screen."""
    text: ShownText


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn on a page."""

    turn: ShownTurn
    asked: Sequence[AskedMessage]
    marks: Markup
    """The answer's tokens; empty where they were not kept."""
    answer: ShownText
    """The answer's text, where not all of its tokens are shown."""
    thinking: ShownText
    calls: Sequence[tuple[str, ShownText]]


@dataclass(frozen=True, slots=True)
class TrialView:
    """A trial on a page."""

    sheet: TrialSheet
    fate: str
    group_mean: float | None
    members: Sequence[TrialEntry]
    """Its group."""
    turns: Sequence[TurnView]
    first: int
    """Number of the first turn shown."""
    pages: int
    """Of turns."""
    time_bar: Markup
    time: Sequence[Part]
    verifier: ShownText
    error: ShownText


def trial_view(
    sheet: TrialSheet, members: Sequence[TrialEntry], *, page: int = 1, colour: str = "logprob", turns: int = TURNS
) -> TrialView:
    """The page of a trial.

    Args:
        sheet: The trial.
        members: The trials of its group, itself among them; empty without one.
        page: Which of its turns, from 1.
        colour: Of its tokens: by `logprob` or by `advantage`.
        turns: How many on a page.
    """
    rewards = [line.reward for line in members if line.reward is not None]
    mean = fmean(rewards) if rewards and sheet.line.kind == "train" else None
    chosen = sheet.turns[(page - 1) * turns : page * turns]
    time, room, views = trial_seconds(sheet.timings), MOST_TOKENS, []
    for turn in chosen:
        views.append(turn_view(turn, colour=colour, room=room))
        room = max(0, room - turn.sampled_len)
    return TrialView(
        sheet=sheet,
        fate=trial_fate(sheet.line, mean),
        group_mean=mean,
        members=members,
        turns=views,
        first=(page - 1) * turns + 1,
        pages=max(1, -(-len(sheet.turns) // turns)),
        time_bar=split_bar(time, label="Where the trial's time went", height=14),
        time=time,
        verifier=shown(sheet.verifier_output),
        error=shown(sheet.error),
    )


def turn_view(turn: ShownTurn, *, colour: str, room: int) -> TurnView:
    """A turn, at most `room` of its tokens one by one."""
    tokens = turn.tokens(room) if turn.tokens is not None and room else ()
    whole = bool(tokens) and turn.spelled and len(tokens) >= turn.sampled_len
    return TurnView(
        turn=turn,
        asked=[_asked(message.role, message.text) for message in turn.asked],
        marks=token_marks(tokens, colour=colour),
        answer=shown("" if whole else turn.answer),
        thinking=shown(turn.thinking),
        calls=[(visible(name), shown(arguments)) for name, arguments in turn.calls],
    )


def _asked(role: str, text: str) -> AskedMessage:
    """A message; of the empty lines of a terminal it is said how many they are."""
    terminal = SCREEN in text[:4000] or role == "tool"
    label = (
        "terminal" if terminal and role == "user" else {"user": "told to the model", "system": "system"}.get(role, role)
    )
    return AskedMessage(role, label, terminal, shown(_tightened(text) if terminal else text))


def _tightened(screen: str) -> str:
    """A terminal's screen without the empty lines that only fill its height."""
    return _EMPTY.sub(lambda found: f"\n⋮ {found[0].count(chr(10)) - 1} empty lines\n", screen.rstrip())
