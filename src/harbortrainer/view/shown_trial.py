"""What the pages show, typed: a trial as a line, a trial in full, and what a run is. No I/O here.

Contract: the one thing that templates and charts know; whoever reads a run, an evaluation or a run of Prime-RL makes
these of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

OPEN = -1
"""The step of a trial that ended after the last finished step or evaluation."""


@dataclass(frozen=True, slots=True)
class TrialEntry:
    """One trial, as a list shows it."""

    trial: str
    """Its name, which is its address."""
    kind: str
    """`train` or `eval`."""
    step: int
    """The step before which it ended; of an evaluation the policy version; `OPEN` while no step has taken it."""
    task: str
    task_key: str = ""
    source: str = ""
    group: str = ""
    """Empty for a trial without one."""
    outcome: str = ""
    reward: float | None = None
    """None when it could not be graded."""
    advantage: float | None = None
    not_trained: str = ""
    """Why it did not train; empty when it did, and in an evaluation."""
    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float | None = None
    """Of the whole trial."""
    version: int | None = None
    """The policy version that sampled it."""

    @property
    def step_word(self) -> str:
        """Its step; a dash while that is open."""
        return "–" if self.step == OPEN else str(self.step)

    @property
    def trained(self) -> bool:
        """Whether its tokens went into an update."""
        return self.kind == "train" and self.advantage is not None and not self.not_trained


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of an answer."""

    text: str
    logprob: float | None = None
    """At which it was sampled; None for a token that was not sampled."""
    advantage: float | None = None
    """None where it did not train."""
    trains: bool = False
    """Whether it went into an update."""
    cut: bool = False
    """Whether it does not because it lies beyond `seq_len`."""
    token_id: int | None = None


type TokensOf = Callable[[int], Sequence[ShownToken]]
"""Looked up when a page shows them: a trial can have a hundred thousand."""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """What was said to the model, or by it, without its tokens."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One answer of the model, and what it was asked."""

    number: int
    """From 1."""
    asked: Sequence[ShownMessage]
    """What was added before it: the task, then what the terminal showed."""
    answer: str
    tokens: TokensOf | None = None
    """The answer's first ones, as many as are asked for; None where they were not kept."""
    spelled: bool = True
    """Whether the tokens are known by their text, not by number alone."""
    mean_logprob: float | None = None
    """Over all its tokens."""
    rewritten: bool = False
    """Whether it was asked with another history than the answer before it left behind."""
    thinking: str = ""
    """The model's reasoning, where it is told apart."""
    calls: Sequence[tuple[str, str]] = ()
    """Tools that it called, with their arguments as it wrote them."""
    prompt_len: int = 0
    """Tokens before it."""
    sampled_len: int = 0
    """Tokens of it."""
    version: int | None = None
    """The policy version that sampled it."""
    finish: str = ""
    """Why the model stopped."""
    took: float | None = None
    """Seconds of the call."""


@dataclass(frozen=True, slots=True)
class TrialSheet:
    """One trial in full."""

    line: TrialEntry
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the verifier gave, by name."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase; `model` is part of `agent_execution`."""
    error: str = ""
    steps: Sequence[tuple[str, str, Mapping[str, float]]] = ()
    """Of a multi-step trial: name, outcome, rewards."""
    turns: Sequence[ShownTurn] = ()
    verifier_output: str = ""
    changed_files: Sequence[tuple[str, str]] = ()
    """How (added, changed, removed) and which."""
    changed_files_total: int = 0
    changed_tools: Sequence[str] = ()
    evidence: str = ""
    truncated: bool = False
    """Whether a limit ended it."""
    cut_tokens: int = 0
    """Sampled tokens beyond `seq_len`, which did not train."""
    lost_calls: Sequence[str] = ()
    """Model calls without an answer, and why."""
    trial_dir: str = ""
    """Harbor's folder of the trial, where it was kept."""
    transcript: str = ""
    """Why there are no turns to show; empty when there are."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """What is looked at."""

    name: str
    kind: str
    """`run`, `evaluation` or `prime-rl`."""
    path: str
    model: str
    status: str
    """`running`, `finished`, `interrupted`, `stopped`, or `cut off`: no summary, and nobody at work."""
    facts: Sequence[tuple[str, str]] = ()
    """What else is known, as name and value."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What became of one task at one step."""

    mean: float | None
    """Of the graded trials; None when there is none."""
    graded: int
    lost: int


def trial_fate(line: TrialEntry, group_mean: float | None = None) -> str:
    """Why a trial did or did not train, in a sentence."""
    if line.kind == "eval":
        return "A trial of an evaluation: it measures the policy and never trains."
    if line.trained:
        sign = "more" if (line.advantage or 0) > 0 else "less"
        of = "" if group_mean is None else f" ({line.reward:g} against its group's mean of {group_mean:.3g})"
        return f"It trained: its tokens were made {sign} likely, by an advantage of {line.advantage:+.3g}{of}."
    return f"It did not train: {FATES.get(line.not_trained, line.not_trained or 'the run does not say why')}."


FATES = {
    "failed": "its outcome is not the policy's doing, so it has no reward, or no token of it was sampled",
    "too few survivors": "the other trials of its group failed, so there was nothing to compare its reward with",
    "too old": "the policy had moved on too far since it was sampled",
    "no signal in its group": "every reward of its group was the same, so none was better or worse than expected",
    "rejected by a gate": "a gate of the curriculum rejected its group",
    "not decided yet": "it ended after the last finished step, and what becomes of it is still open",
    "left out by Prime-RL": "Prime-RL left its group out, most often because all rewards were the same",
    "its reward is its group's mean": "its reward is its group's mean, so its advantage is 0; the others trained",
}
