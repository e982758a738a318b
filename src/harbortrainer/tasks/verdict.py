"""The verdict on a task from the trials of its check. No trial is run here.

Invariants: a verdict without a `problem` means that all its oracle and `nop` trials ended as `completed`, the oracle
always reached the top reward, and `nop` never did. `forged` has only cheats with more reward than any `nop` trial.
Each finding has one category, the part that has to change.
"""

import re
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field, computed_field

from harbortrainer.errors import clauses
from harbortrainer.tasks.cheats import MUTANTS
from harbortrainer.tasks.checked_trial import Category, CheckedTrial
from harbortrainer.trials.outcome import DEFAULT_KEY
from harbortrainer.trials.record import Timings

TOP_REWARD = 1.0
"""Reward of a solved task, by the convention of Harbor's registry."""

ORACLE, NOP = "oracle", "nop"

_OF_THIS_MACHINE = ("host", "network")

_NO_SCORE = re.compile(
    r"fail|error|timeout|skip|invalid|count|chars|characters|tokens|lines|steps|seconds|duration|_ms$"
)
"""Names of rewards that look like counters or failure flags."""


class Finding(BaseModel):
    """One finding on a task."""

    severity: Literal["bad", "weak", "note"]
    """`bad`: not fit to train on. `weak`: fit, but look at its reward first. `note`: a warning."""
    category: Category
    """The part that has to change."""
    what: str


class Verdict(BaseModel):
    """The result of checking one task."""

    task: str
    key: str = ""
    """Hash of the task's content; empty if it cannot be read."""
    environment: str = ""
    """Type of the sandboxes; for `auto`, the chosen type."""
    findings: list[Finding] = Field(default_factory=list)
    """The findings: first bad, then weak ones, then notes."""
    forged: dict[str, float] = Field(default_factory=dict)
    """Reward of each cheat that got one, by name."""
    lint: list[str] = Field(default_factory=list)
    """Findings of `harbor lint`, one line each; they do not affect the verdict."""
    trace: str = ""
    """Stack trace of the exception that a library raised over the task's files; empty if there was none."""
    trials: list[CheckedTrial] = Field(default_factory=list)
    """Trials in the order in which they ran."""

    @computed_field
    @property
    def problem(self) -> str:
        """Problems of the task; empty if there are none."""
        return clauses(*self._of_severity("bad"))

    @property
    def doubts(self) -> list[str]:
        """Reasons why the verifier's rewards may mislead; empty if there are none."""
        return self._of_severity("weak")

    @property
    def note(self) -> str:
        """Warnings, and what was not checked; empty if there are none."""
        return clauses(*self._of_severity("note"))

    @property
    def word(self) -> str:
        """`BAD`, `WEAK` or `ok`."""
        return "BAD" if self.problem else "WEAK" if self.doubts else "ok"

    @property
    def is_decided(self) -> bool:
        """Whether trials were run, and no problem is this machine's or its network's."""
        machine = any(f.severity == "bad" and f.category in _OF_THIS_MACHINE for f in self.findings)
        return bool(self.trials) and not machine

    def _of_severity(self, severity: str) -> list[str]:
        return [finding.what for finding in self.findings if finding.severity == severity]

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


def bad(category: Category, what: str) -> Finding:
    """Make a finding of a task that is not fit to train on."""
    return Finding(severity="bad", category=category, what=what)


def weak(category: Category, what: str) -> Finding:
    """Make a finding of a task that is fit, but whose reward may mislead."""
    return Finding(severity="weak", category=category, what=what)


def note(category: Category, what: str) -> Finding:
    """Make a warning."""
    return Finding(severity="note", category=category, what=what)


def verdict_of(task: str, key: str, trials: Sequence[CheckedTrial]) -> Verdict:
    """Return the verdict from a task's trials: `nop`, the oracle if there is a solution, and cheats."""
    verdict = Verdict(task=task, key=key, trials=list(trials))
    oracle, nop = verdict.of(ORACLE), verdict.of(NOP)
    flaky = [
        bad("verifier", f"flaky: {agent} got {_listed(of)}")
        for agent, of in ((ORACLE, oracle), (NOP, nop))
        if len({trial.reward for trial in of}) > 1
    ]
    problems = [*_failures(trials), *flaky, *([] if flaky else [*_unsolved(oracle), *_too_easy(oracle, nop)])]
    if not flaky:
        verdict.forged = _forged(trials, nop)
    verdict.findings = [
        *problems,
        *_rewarded_cheats(verdict.forged),
        *([] if flaky else _rewarded_mutants(trials)),
        *_doubts(trials),
        *([] if oracle else [note("solution", "no solution, so the oracle was not run")]),
    ]
    return verdict


def _forged(trials: Sequence[CheckedTrial], nop: Sequence[CheckedTrial]) -> dict[str, float]:
    """Return the rewards of cheats that got more than any `nop` trial, by name."""
    most = max((trial.reward for trial in nop if trial.reward is not None), default=0.0)
    return {
        trial.agent: trial.reward
        for trial in trials
        if trial.agent not in (ORACLE, NOP, *MUTANTS) and trial.reward is not None and trial.reward > most
    }


def _rewarded_cheats(forged: dict[str, float]) -> list[Finding]:
    got = ", ".join(f"{cheat} ({reward:g})" for cheat, reward in forged.items())
    return [weak("verifier", f"a reward without a solution: {got}")] if got else []


def _rewarded_mutants(trials: Sequence[CheckedTrial]) -> list[Finding]:
    passed = [t.agent for t in trials if t.agent in MUTANTS and t.reward is not None and t.reward >= TOP_REWARD]
    return [weak("verifier", f"the verifier accepts a spoiled solution: {', '.join(passed)}")] if passed else []


def _doubts(trials: Sequence[CheckedTrial]) -> list[Finding]:
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
    return [weak("verifier", doubt) for doubt in doubts]


def _failures(trials: Sequence[CheckedTrial]) -> list[Finding]:
    """Describe the failed trials, one line per agent. A failed cheat is no problem: it may have broken the verifier."""
    failed = {trial.agent: trial for trial in trials if trial.agent in (ORACLE, NOP) and trial.failure}
    return [bad(t.blame or "host", f"the {agent} trial {t.failure}{t.words}") for agent, t in failed.items()]


def _unsolved(oracle: Sequence[CheckedTrial]) -> list[Finding]:
    low = [trial for trial in oracle if trial.reward is not None and trial.reward < TOP_REWARD]
    if not low:
        return []
    first = low[0]
    what = f"the oracle's reward is {first.reward:g}, not {TOP_REWARD:g}: "
    if first.network_error:
        return [bad("network", f"{what}an address was not reached ({first.network_error}){first.words}")]
    cause = "the solution failed" if first.solution_exit else "the solution or the verifier is wrong"
    return [bad("solution", f"{what}{cause}{first.words}")]


def never_solved(trials: Sequence[CheckedTrial]) -> bool:
    """Whether the oracle was run and never got the top reward."""
    rewards = [trial.reward for trial in trials if trial.agent == ORACLE]
    return bool(rewards) and all(reward is None or reward < TOP_REWARD for reward in rewards)


def _too_easy(oracle: Sequence[CheckedTrial], nop: Sequence[CheckedTrial]) -> list[Finding]:
    least = min((trial.reward for trial in oracle if trial.reward is not None), default=TOP_REWARD)
    high = [t for t in nop if t.reward is not None and (t.reward >= TOP_REWARD or t.reward > least)]
    if not high:
        return []
    cause = ": the verifier accepts any result"
    if least < TOP_REWARD:
        cause = f", the solution {least:g}: the verifier is flaky or wrong"
    return [bad("verifier", f"doing nothing gets reward {high[0].reward:g}{cause}{high[0].words}")]


def _listed(trials: Sequence[CheckedTrial]) -> str:
    return ", ".join("no reward" if trial.reward is None else f"{trial.reward:g}" for trial in trials)
