"""The verdict on a task from the trials of its check. No trial is run here.

Invariants: a verdict without a `problem` means that all its oracle and `nop` trials ended as `completed`, the oracle
always reached the top reward, and `nop` never did. `forged` has only cheats with more reward than any `nop` trial.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from harbortrainer.trials.harbor_result import summarize_in_one_line
from harbortrainer.trials.outcome import DEFAULT_KEY, Outcome
from harbortrainer.trials.record import Timings, TrialRecord

TOP_REWARD = 1.0
"""Reward of a solved task, by the convention of Harbor's registry."""

LAST_LINES = 3
"""Lines of the verifier's output shown with an unexpected reward."""

ORACLE, NOP = "oracle", "nop"

_NO_SCORE = re.compile(
    r"fail|error|timeout|skip|invalid|count|chars|characters|tokens|lines|steps|seconds|duration|_ms$"
)
"""Names of rewards that look like counters or failure flags."""


class CheckedTrial(BaseModel):
    """One trial of a check."""

    agent: str
    """`oracle`, `nop`, or the name of a cheat."""
    outcome: Outcome
    rewards: dict[str, float] = Field(default_factory=dict)
    """The verifier's rewards by name."""
    reward_key: str | None = None
    """The name of `reward` among them, where one is set."""
    reward: float | None
    """None when the outcome does not train."""
    seconds: Timings
    failure: str = ""
    """The error of a trial that did not complete."""
    last_words: str = ""
    """Last lines of the verifier's output."""


class Verdict(BaseModel):
    """The result of checking one task."""

    task: str
    key: str = ""
    """Hash of the task's content."""
    environment: str = ""
    """Type of the sandboxes; for `auto`, the chosen type."""
    problem: str = ""
    """Problems of the task; empty if there are none."""
    forged: dict[str, float] = Field(default_factory=dict)
    """Reward of each cheat that got one, by name."""
    doubts: list[str] = Field(default_factory=list)
    """Reasons why the verifier's numbers may be no reward; empty if there are none."""
    note: str = ""
    """Warnings, and what was not checked; empty if there are none."""
    lint: list[str] = Field(default_factory=list)
    """Findings of `harbor lint`, one line each; they do not affect the verdict."""
    trace: str = ""
    """Stack trace of the exception that a library raised over the task's files; empty if there was none."""
    trials: list[CheckedTrial] = Field(default_factory=list)
    """Trials in the order in which they ran."""

    def of(self, agent: str) -> list[CheckedTrial]:
        """Return the trials of one agent."""
        return [trial for trial in self.trials if trial.agent == agent]

    @property
    def seconds(self) -> Timings:
        """Mean seconds of each phase over the oracle's trials, or over `nop`'s if there is no solution."""
        trials = self.of(ORACLE) or self.of(NOP)
        phases = {
            phase: [seconds for trial in trials if (seconds := getattr(trial.seconds, phase)) is not None]
            for phase in Timings.model_fields
        }
        return Timings(**{phase: sum(seconds) / len(seconds) for phase, seconds in phases.items() if seconds})


def checked_trial(agent: str, record: TrialRecord) -> CheckedTrial:
    """Summarize a trial; its folder must still exist, since the verifier's output is read from it."""
    failure = f"ended as {record.outcome}{f' ({summarize_in_one_line(record.error.message)})' if record.error else ''}"
    return CheckedTrial(
        agent=agent,
        outcome=record.outcome,
        rewards=record.rewards or {},
        reward_key=record.reward_key,
        reward=record.reward,
        seconds=record.timings,
        failure="" if record.outcome is Outcome.completed else failure,
        last_words=_last_words(record),
    )


def verdict_of(task: str, key: str, trials: Sequence[CheckedTrial]) -> Verdict:
    """Return the verdict from a task's trials: `nop`, the oracle if there is a solution, and cheats."""
    verdict = Verdict(task=task, key=key, trials=list(trials))
    oracle, nop = verdict.of(ORACLE), verdict.of(NOP)
    flaky = [f"flaky: {agent} got {_listed(of)}" for agent, of in ((ORACLE, oracle), (NOP, nop)) if _differ(of)]
    problems = [*_failures(trials), *flaky, *([] if flaky else [*_unsolved(oracle), *_too_easy(nop)])]
    verdict.problem = "; ".join(problems)
    verdict.doubts = _doubts(trials)
    if not oracle:
        verdict.note = "no solution, so the oracle was not run"
    if not flaky:
        most = max((trial.reward for trial in nop if trial.reward is not None), default=0.0)
        verdict.forged = {
            trial.agent: trial.reward
            for trial in trials
            if trial.agent not in (ORACLE, NOP) and trial.reward is not None and trial.reward > most
        }
    return verdict


def _doubts(trials: Sequence[CheckedTrial]) -> list[str]:
    doubts = []
    if high := max((t.reward for t in trials if t.reward is not None and t.reward > TOP_REWARD), default=None):
        doubts.append(f"a reward is {high:g}, above {TOP_REWARD:g}")
    names = sorted(
        {name for t in trials if t.reward_key is None and DEFAULT_KEY not in t.rewards for name in t.rewards}
    )
    if len(names) > 1:
        doubts.append(
            f"the verifier gives {', '.join(names)} and no {DEFAULT_KEY!r}, so their mean is trained on: "
            "set reward_key (here --reward-key)"
        )
    if suspects := list(filter(_NO_SCORE.search, names)):
        doubts.append(f"{', '.join(suspects)}: by name a counter or a failure flag, and no score")
    return doubts


def _failures(trials: Sequence[CheckedTrial]) -> list[str]:
    """Describe the failed trials, one line per agent. A failed cheat is no problem: it may have broken the verifier."""
    failed = {trial.agent: trial for trial in trials if trial.agent in (ORACLE, NOP) and trial.failure}
    words = {agent: t.last_words if t.outcome is Outcome.verifier_error else "" for agent, t in failed.items()}
    return [f"the {agent} trial {trial.failure}{words[agent]}" for agent, trial in failed.items()]


def _unsolved(oracle: Sequence[CheckedTrial]) -> list[str]:
    low = [trial for trial in oracle if trial.reward is not None and trial.reward < TOP_REWARD]
    what = "the oracle's reward is {:g}, not {:g}: the solution or the verifier is wrong"
    return [what.format(low[0].reward, TOP_REWARD) + low[0].last_words] if low else []


def _too_easy(nop: Sequence[CheckedTrial]) -> list[str]:
    high = [trial for trial in nop if trial.reward is not None and trial.reward >= TOP_REWARD]
    what = "doing nothing gets reward {:g}: the verifier accepts any result"
    return [what.format(high[0].reward) + high[0].last_words] if high else []


def _differ(trials: Sequence[CheckedTrial]) -> bool:
    return len({trial.reward for trial in trials}) > 1


def _listed(trials: Sequence[CheckedTrial]) -> str:
    return ", ".join("no reward" if trial.reward is None else f"{trial.reward:g}" for trial in trials)


def _last_words(record: TrialRecord) -> str:
    files = sorted(Path(record.trial_dir).rglob("test-stdout.txt")) if record.trial_dir else []
    lines = [line.strip() for file in files for line in file.read_text(errors="replace").split("\n") if line.strip()]
    return f" (the verifier's last lines: {' | '.join(lines[-LAST_LINES:])[-400:]})" if lines else ""
