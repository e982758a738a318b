"""Data types of the pages: trials with their turns, and the run itself. No I/O.

Contract: templates and charts use only these types and `TrialRow`. Each reader of a run folder converts to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harbortrainer.runs.transcript import ChangedFile
from harbortrainer.runs.trial_row import UNDECIDED, TrialRow
from harbortrainer.trials.outcome import Outcome

UNDECIDED_STEP = -1
"""Step in the index of a trial that ended after the last finished step or evaluation."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of an answer."""

    text: str
    logprob: float | None = None
    """Log-probability at sampling; None if the token was not sampled."""
    advantage: float | None = None
    """None if the token was not trained on."""
    trains: bool = False
    """Whether the token was part of an update."""
    beyond_seq_len: bool = False
    """Whether the token was not trained on because it lies beyond `seq_len`."""
    token_id: int | None = None


type TokensOf = Callable[[int], Sequence[TokenView]]
"""Function that returns the first n tokens. They are decoded on demand: a trial can have 100 000."""


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message of the conversation, without its tokens."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class TurnDetail:
    """One answer of the model with the messages before it."""

    number: int
    """From 1."""
    prompt: Sequence[MessageView]
    """Messages since the previous answer: first the task, then the terminal's output."""
    answer: str
    tokens: TokensOf | None = None
    """The sampled tokens; None if they were not saved."""
    has_text: bool = True
    """Whether tokens have their text; otherwise they are shown as ids."""
    mean_logprob: float | None = None
    """Mean over all sampled tokens."""
    rewritten: bool = False
    """Whether the agent rewrote the history since the previous answer."""
    thinking: str = ""
    """The model's reasoning, if it is separate from the answer."""
    calls: Sequence[tuple[str, str]] = ()
    """Tool calls: name and raw arguments."""
    prompt_len: int = 0
    """Number of tokens in the prompt."""
    sampled_len: int = 0
    """Number of sampled tokens."""
    version: int | None = None
    """The policy version that sampled it."""
    finish: str = ""
    """Finish reason of the model."""
    plain: bool = False
    """Whether it is of the plain agent: one command, whose output is the next prompt."""
    took: float | None = None
    """Duration of the model call in seconds."""


@dataclass(frozen=True, slots=True)
class TrialDetail:
    """One trial with its turns."""

    row: TrialRow
    error: str = ""
    """The full error if a transcript was saved, otherwise the row's error."""
    turns: Sequence[TurnDetail] = ()
    verifier_output: str = ""
    changed_files: Sequence[ChangedFile] = ()
    changed_files_total: int = 0
    changed_tools: Sequence[str] = ()
    evidence: str = ""
    failed_calls: Sequence[str] = ()
    """Errors of the failed model calls."""
    trial_dir: str = ""
    """Harbor's trial folder, if it was kept."""
    transcript: str = ""
    """Why there are no turns; empty if there are turns."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """Name, kind and status of a run or evaluation."""

    name: str
    kind: str
    """`run`, `evaluation` or `prime-rl`."""
    path: str
    model: str
    status: str
    """`running`, `finished`, `interrupted`, `stopped`, `ended`, or `incomplete` (no process and no summary)."""
    facts: Sequence[tuple[str, str]] = ()
    """Further pairs of name and value for the title."""
    failed_check: tuple[int, str] | None = None
    """Step and message of the check of the training data that stopped the run; None if none did."""
    wall_s: float | None = None
    """Wall-clock seconds of an ended run, from its summary; None if they are unknown."""


class TaskLabel(NamedTuple):
    """Name of a task on the heat map."""

    name: str
    source: str = ""
    """Its source, if several sources have a task of this name."""

    def __str__(self) -> str:
        return f"{self.name} ({self.source})" if self.source else self.name


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one task at one step."""

    mean: float | None
    """Mean reward of the graded trials; None if there is none."""
    graded: int
    """Number of graded trials."""
    ungraded: int
    """Number of trials without a reward."""


def training_summary(row: TrialRow, group_mean: float | None = None) -> str:
    """Return one sentence on why a trial was or was not trained on."""
    if row.kind == "eval":
        return "Evaluation trial: never trained on."
    if row.trained and not row.advantage:
        return "Its advantage is 0, so its sampled tokens were not trained on; with ECHO, tokens of its prompts were."
    if row.trained:
        sign = "more" if (row.advantage or 0) > 0 else "less"
        means = (
            "" if group_mean is None or row.reward is None else f"; reward {row.reward:g}, group mean {group_mean:.3g}"
        )
        return f"Trained on: its tokens were made {sign} likely (advantage {row.advantage:+.3g}{means})."
    return f"Not trained on: {UNTRAINED_REASONS.get(row.untrained, row.untrained or 'reason not recorded')}."


def reward_summary(row: TrialRow) -> str:
    """Return the reason of a reward, or of its absence."""
    ending = ENDINGS.get(row.outcome, f"The trial ended with the outcome {row.outcome or 'unknown'}.")
    if row.reward is None:
        return f"No reward. {ending}"
    if row.outcome == Outcome.self_inflicted:
        return f"Reward {row.reward:g} without the verifier. {ending}"
    return f"{ending} The verifier gave that state {row.reward:g}."


ENDINGS: dict[str, str] = {
    Outcome.completed: "The agent ended the trial.",
    Outcome.agent_timeout: "The agent's time was up.",
    Outcome.turn_limit: "The agent used all of its turns.",
    Outcome.context_limit: "The conversation no longer fitted into the model's context.",
    Outcome.output_limit: "Consecutive answers were cut at their length.",
    Outcome.self_inflicted: "The agent destroyed its own sandbox, shell or disk.",
    Outcome.timeout_masked: "The agent's time was up, and this run does not train on such trials.",
    Outcome.tampered: "The agent changed tools that the verifier uses, and this run does not train on such trials.",
    Outcome.agent_error: "The agent's program failed. That says nothing about the policy.",
    Outcome.model_error: "The model's server failed or did not answer. That says nothing about the policy.",
    Outcome.sandbox_error: "The sandbox failed. That says nothing about the policy.",
    Outcome.verifier_error: "The verifier failed, so the state that the agent left was not graded.",
    Outcome.cancelled: "The run cancelled the trial.",
}
"""How a trial with each outcome ended."""

UNTRAINED_REASONS = {
    "failed": "the trial failed for a reason outside the policy and has no reward, or it has no sampled tokens",
    "too few survivors": "the other trials of its group failed, so there is no reward to compare with",
    "too old": "it was sampled too many policy versions ago",
    "no signal in its group": (
        "all rewards of its group are equal, or with max_rl their mean is not above 0, so every advantage is 0"
    ),
    "rejected by a gate": "a curriculum gate rejected its group",
    UNDECIDED: "not decided yet, because it ended after the last finished step",
    "left out by Prime-RL": "Prime-RL dropped its group, usually because all rewards were equal",
    "its reward is its group's mean": "its reward equals the group mean, so its advantage is 0",
}
