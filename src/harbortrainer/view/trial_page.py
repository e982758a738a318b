"""Content of a trial's page: its turns, with the sampled tokens coloured by log-probability or advantage.

Contract: all text is escaped. A page has at most `MAX_TOKENS` coloured tokens; the rest of an answer is plain text.
Pure.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from statistics import fmean

from markupsafe import Markup, escape

from harbortrainer.runs.transcript import ChangedFile
from harbortrainer.runs.trial_row import TrialRow
from harbortrainer.view.agent_actions import AgentActions, actions_of, instruction_in
from harbortrainer.view.charts import Part, split_bar
from harbortrainer.view.format import ClippedText, clip, escape_invisible
from harbortrainer.view.overview import trial_seconds
from harbortrainer.view.trial_view import TokenView, TrialDetail, TurnDetail, reward_summary, training_summary

MAX_TOKENS = 6000
"""Most coloured tokens on a page."""
_LEVEL_BOUNDS = (0.9, 0.6, 0.3, 0.1, 0.03, 0.003)
"""Probabilities at which the colour changes, in descending order."""
COLOURS = ("logprob", "advantage")


def level(logprob: float) -> int:
    """Return the colour level of a token, from 0 (almost certain) to 6 (very unlikely).

    Example:
        >>> [level(value) for value in (0.0, -0.7, -10.0)]
        [0, 2, 6]
    """
    probability = math.exp(min(0.0, logprob))
    return sum(probability < bound for bound in _LEVEL_BOUNDS)


def token_marks(tokens: Sequence[TokenView], *, colour: str = "logprob") -> Markup:
    """Render tokens as coloured text; the tooltip of each shows its numbers."""
    return Markup("").join(_mark(token, colour) for token in tokens)


def _mark(token: TokenView, colour: str) -> Markup:
    classes = [_style(token, colour)] + (["untrained"] if token.beyond_seq_len else [])
    return Markup('<span class="t {}" title="{}">{}</span>').format(
        " ".join(classes), _tooltip(token), _piece(token.text)
    )


def _piece(text: str) -> Markup:
    """Escape a token's text; a newline is shown as a symbol and still breaks the line."""
    return (
        escape(escape_invisible(text)).replace("\n", Markup('<i class="nl">↵</i>\n'))
        if text
        else Markup('<i class="nl">∅</i>')
    )


def _style(token: TokenView, colour: str) -> str:
    if colour == "advantage":
        return "a0" if not token.advantage or not token.trains else "up" if token.advantage > 0 else "down"
    return "p0" if token.logprob is None else f"p{level(token.logprob)}"


def _tooltip(token: TokenView) -> str:
    parts: list[str] = []
    if token.logprob is not None:
        parts.append(f"log-probability {token.logprob:.4g} (p {math.exp(min(0.0, token.logprob)):.3g})")
    if token.trains and token.advantage is not None:
        parts.append(f"advantage {token.advantage:+.4g}")
    if not token.trains:
        parts.append("beyond seq_len, not trained on" if token.beyond_seq_len else "not trained on")
    return ", ".join([*parts, *([f"id {token.token_id}"] if token.token_id is not None else [])])


TURNS = 12
"""Turns on a page."""
VERIFIER_LINES = 25
"""Last lines of the verifier's output that are shown first."""
SCREEN_HEADER = "New Terminal Output:"
"""Text before the terminal's screen in Terminus-2's messages."""
_EMPTY_LINES = re.compile(r"\n(?:[ \t]*\n){4,}")


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """A message of the prompt."""

    role: str
    label: str
    """Heading of the message."""
    terminal: bool
    """Whether it shows the terminal's screen."""
    text: ClippedText


@dataclass(frozen=True, slots=True)
class TurnSection:
    """One turn of the page."""

    turn: TurnDetail
    prompt: Sequence[PromptMessage]
    """Messages before the answer that no earlier turn shows as its result."""
    actions: AgentActions | None
    """What the answer does; None if its format is unknown."""
    commands: Sequence[ClippedText]
    thoughts: ClippedText
    marks: Markup
    """The coloured tokens of the answer; empty if they were not saved."""
    answer: ClippedText
    """The answer's text; empty if `marks` shows all of its tokens."""
    thinking: ClippedText
    calls: Sequence[tuple[str, ClippedText]]
    result: Sequence[PromptMessage]
    """Messages after the answer: the terminal's screen, or output of tools."""


@dataclass(frozen=True, slots=True)
class FileSection:
    """A file that the agent added, changed or removed."""

    how: str
    """`added`, `changed` or `removed`."""
    path: str
    size: int
    """Bytes; 0 for a removed file."""
    lines: Sequence[tuple[str, str]]
    """Kind (`plus`, `minus`, `hunk` or `same`) and text of each line of the difference; empty if no text is kept."""


@dataclass(frozen=True, slots=True)
class TrialPage:
    """Values of the template of a trial's page."""

    detail: TrialDetail
    reason: str
    """Why the trial has its reward."""
    summary: str
    """Why it was or was not trained on."""
    instruction: ClippedText
    group_mean: float | None
    members: Sequence[TrialRow]
    """The trials of its group, in the order of their numbers."""
    number: int | None
    """Number of this trial in its group, from 1; None without a group."""
    turns: Sequence[TurnSection]
    first: int
    """Number of the first turn on this page."""
    pages: int
    """Number of pages of turns."""
    time_bar: Markup
    time: Sequence[Part]
    verifier: ClippedText
    """Last lines of the verifier's output."""
    verifier_before: ClippedText
    """The output before them."""
    error: ClippedText
    files: Sequence[FileSection]


def trial_page_of(
    detail: TrialDetail, members: Sequence[TrialRow], *, page: int = 1, colour: str = "logprob", turns: int = TURNS
) -> TrialPage:
    """Return the values for a trial's page.

    Args:
        detail: The trial.
        members: The trials of its group, including this one; empty without a group.
        page: Page of turns, from 1.
        colour: Token colour: `logprob` or `advantage`.
        turns: Turns per page.
    """
    rewards = [line.reward for line in members if line.reward is not None]
    mean = fmean(rewards) if rewards and detail.row.kind == "train" else None
    numbers = [number for number, line in enumerate(members, 1) if line.trial == detail.row.trial]
    time = trial_seconds(detail.row.timings)
    before, last = last_lines(_collapse_empty_lines(detail.verifier_output), VERIFIER_LINES)
    return TrialPage(
        detail=detail,
        reason=reward_summary(detail.row),
        summary=training_summary(detail.row, mean),
        instruction=clip(instruction_of(detail)),
        group_mean=mean,
        members=members,
        number=numbers[0] if numbers else None,
        turns=_turn_sections(detail.turns, first=(page - 1) * turns, count=turns, colour=colour),
        first=(page - 1) * turns + 1,
        pages=max(1, -(-len(detail.turns) // turns)),
        time_bar=split_bar(time, label="Time of the trial by phase", height=14),
        time=time,
        verifier=clip(last),
        verifier_before=clip(before),
        error=clip(detail.error),
        files=[_file_section(file) for file in detail.changed_files],
    )


def _file_section(file: ChangedFile) -> FileSection:
    return FileSection(file.how, escape_invisible(file.path), file.size, list(diff_lines(file.before, file.after)))


_LINE_KINDS = {"+": "plus", "-": "minus", "@": "hunk", " ": "same"}


def diff_lines(before: str | None, after: str | None) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each line of a unified difference, without the names of the files.

    Example:
        >>> list(diff_lines("a", "b"))
        [('hunk', '@@ -1 +1 @@'), ('minus', '-a'), ('plus', '+b')]
    """
    lines = unified_diff(_lines(before), _lines(after), lineterm="")
    for line in islice(lines, 2, None):
        yield _LINE_KINDS[line[0]], escape_invisible(line)


def _lines(text: str | None) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def instruction_of(detail: TrialDetail) -> str:
    """Return the task's instruction, from the last message of the user before the first answer."""
    prompt = detail.turns[0].prompt if detail.turns else ()
    texts = [message.text for message in prompt if message.role == "user"]
    return instruction_in(texts[-1]) if texts else ""


def last_lines(text: str, count: int) -> tuple[str, str]:
    """Split a text before its last `count` lines."""
    lines = text.strip().split("\n")
    return "\n".join(lines[:-count]), "\n".join(lines[-count:])


def _turn_sections(turns: Sequence[TurnDetail], *, first: int, count: int, colour: str) -> list[TurnSection]:
    """Return `count` turns from index `first`; they share the limit on coloured tokens."""
    token_limit, sections = MAX_TOKENS, []
    for index in range(first, min(first + count, len(turns))):
        turn, after = turns[index], turns[index + 1] if index + 1 < len(turns) else None
        sections.append(turn_section(turn, after, colour=colour, token_limit=token_limit))
        token_limit = max(0, token_limit - turn.sampled_len)
    return sections


def turn_section(turn: TurnDetail, after: TurnDetail | None, *, colour: str, token_limit: int) -> TurnSection:
    """Return a turn with at most `token_limit` coloured tokens; the prompt of the turn `after` is its result."""
    tokens = turn.tokens(token_limit) if turn.tokens is not None and token_limit else ()
    whole = bool(tokens) and turn.has_text and len(tokens) >= turn.sampled_len
    actions = actions_of(turn.answer, turn.calls, plain=turn.plain, cut=turn.finish == "length")
    return TurnSection(
        turn=turn,
        prompt=_prompt_messages(turn) if turn.number == 1 or turn.rewritten else [],
        actions=actions,
        commands=[clip(command) for command in (actions.commands if actions else ())],
        thoughts=clip(actions.thoughts if actions else ""),
        marks=token_marks(tokens, colour=colour),
        answer=clip("" if whole else turn.answer),
        thinking=clip(turn.thinking),
        calls=[(escape_invisible(name), clip(arguments)) for name, arguments in turn.calls],
        result=_prompt_messages(after, output=after.plain) if after is not None and not after.rewritten else [],
    )


def _prompt_messages(turn: TurnDetail, *, output: bool = False) -> list[PromptMessage]:
    """Return the prompt of a turn; `output`: it is the output of the turn before, whatever its role."""
    return [_prompt_message("tool" if output else message.role, message.text) for message in turn.prompt]


def _prompt_message(role: str, text: str) -> PromptMessage:
    """Return a message of the prompt, with runs of empty terminal lines replaced by their count."""
    terminal = SCREEN_HEADER in text[:4000] or role == "tool"
    label = "terminal" if terminal and role == "user" else {"user": "prompt", "system": "system"}.get(role, role)
    return PromptMessage(role, label, terminal, clip(_collapse_empty_lines(text) if terminal else text))


def _collapse_empty_lines(screen: str) -> str:
    """Replace the empty lines that pad a terminal's screen by their count."""
    return _EMPTY_LINES.sub(lambda found: f"\n⋮ {found[0].count(chr(10)) - 1} empty lines\n", screen.rstrip())
