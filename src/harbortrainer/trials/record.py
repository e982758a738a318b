"""The record of a trial: outcome, rewards, timings and counts, as plain JSON.

It is sent on a verifiers trace and read back by `record_of`. Invariant: `reward` is a finite number if
`outcome.trains`, else None. For `self_inflicted` it is 0, and there is evidence.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from harbortrainer.sandbox.errors_and_changes import ChangedFile, SandboxChanges
from harbortrainer.trials.model_calls import AgentCall
from harbortrainer.trials.outcome import Outcome, all_finite

INFO_KEY = "harbor"
"""Key of the record in a trace's `info`."""
_MAX_FILES = 100
"""Changed files that a record names; further ones are only counted."""


class Timings(BaseModel):
    """Seconds of each phase, summed over the steps of a trial; None if the phase did not happen."""

    environment_setup: float | None = None
    agent_setup: float | None = None
    agent_execution: float | None = None
    model: float | None = None
    """Time waiting for the model's answers; part of agent_execution."""
    verifier: float | None = None
    total: float | None = None


class TokenCounts(BaseModel):
    """Tokens counted by the model server."""

    prompt: int = 0
    completion: int = 0


class Failure(BaseModel):
    """The exception that ended the trial."""

    type: str
    message: str


class StepRecord(BaseModel):
    """One step of a multi-step trial."""

    name: str
    outcome: Outcome
    rewards: dict[str, float] | None = None
    turns: int | None = None
    """Answers that the agent got in this step; None if unknown. A step without answers is graded too."""


class TurnTokens(BaseModel):
    """Tokens sampled in one model call.

    Args:
        prompt_ids: [P] token ids of the whole prompt.
        completion_ids: [C] sampled token ids.
        logprobs: [C] their log-probabilities.
        cut: Whether the answer was cut at its length.
        new_message: The message that the agent added for this call, if known.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    cut: bool = False
    new_message: str | None = None


class TrialRecord(BaseModel):
    """Record of one trial, on `trace.info["harbor"]` and in the run folder."""

    model_config = ConfigDict(extra="forbid")

    outcome: Outcome
    task: str
    """Harbor's name for the task."""
    task_key: str = ""
    """Hash of the task's content."""
    environment_type: str = ""
    """Environment type that was used; with `auto`, the chosen one."""
    trial_name: str = ""
    trial_dir: str | None = None
    """Harbor's folder of the trial; None after pruning."""
    rewards: dict[str, float] | None = None
    """Finite rewards of the verifier, by name, also if the outcome does not train."""
    reward_key: str | None = None
    """The name of `reward` among them, where the run sets one."""
    reward: float | None = None
    """Scalar reward for training; None if the outcome does not train."""
    failed_attempts: int = 0
    """Failed attempts of the same episode before this trial."""
    start_wait_s: float = 0.0
    """Seconds before the sandbox's start, in which its provider's starts were limited or held."""
    excused_starts: int = 0
    """Failed starts before this trial that are no attempts: the provider refused them, or many others failed too."""
    timings: Timings = Field(default_factory=Timings)
    turns: int = 0
    parse_errors: int = 0
    tokens: TokenCounts = Field(default_factory=TokenCounts)
    steps: list[StepRecord] = Field(default_factory=list)
    """Steps of a multi-step trial; empty for other trials."""
    error: Failure | None = None
    evidence: str = ""
    """For a failure that the agent may have caused: signs in its sandbox, and results of the infrastructure checks.
    Never empty for `self_inflicted`."""
    changed_files: list[ChangedFile] | None = None
    """The first 100 files that were added, changed or removed in the sandbox while the agent ran, without logs; None
    if unknown."""
    changed_files_total: int = 0
    """Number of all changed files."""
    changed_tools: list[str] = Field(default_factory=list)
    """Descriptions of changed tools that a verifier uses; `on_tampering` sets the consequence."""
    verifier_output: str = ""
    """Output of the verifier; if long, only its beginning and end."""
    turn_tokens: list[TurnTokens] = Field(default_factory=list, exclude=True)
    """Sampled tokens, with `collect_rollout_details`. Not in the JSON, since they are megabytes."""
    calls: list[AgentCall] | None = Field(default=None, exclude=True)
    """Model calls as recorded by the agent's client; None for an agent without a Harbor client."""

    @model_validator(mode="after")
    def _reward_iff_it_trains(self) -> Self:
        if self.outcome.trains != (self.reward is not None):
            raise ValueError(f"{self.outcome} with reward {self.reward}")
        if self.outcome is Outcome.self_inflicted and (self.reward != 0.0 or not self.evidence):
            raise ValueError(f"{self.outcome} with reward {self.reward} and evidence {self.evidence!r}")
        return self

    def to_json(self) -> dict[str, JsonValue]:
        """Return plain JSON, without `turn_tokens` and `calls`."""
        return self.model_dump(mode="json")

    def add_changes(self, changes: SandboxChanges, redact: Callable[[str], str] = str) -> None:
        """Add the changes in the sandbox, with the texts of the files redacted; called once per step."""
        files = [
            replace(file, before=file.before and redact(file.before), after=file.after and redact(file.after))
            for file in changes.files
        ]
        self.changed_files = [*(self.changed_files or []), *files][:_MAX_FILES]
        self.changed_files_total += changes.total
        self.changed_tools = list(dict.fromkeys([*self.changed_tools, *changes.tools]))

    def metrics(self) -> dict[str, float]:
        """Return the trial's metrics: `outcome_X` is 1.0 or 0.0, so that its mean is a share; `time_*` are seconds.

        Rewards of a failed trial are omitted, since means would count them as the policy's.
        """
        numbers: dict[str, float] = {f"outcome_{outcome}": float(outcome is self.outcome) for outcome in Outcome}
        numbers |= {
            "failed_attempts": self.failed_attempts,
            "time_start_wait": self.start_wait_s,
            "excused_starts": self.excused_starts,
            "turns": self.turns,
            "parse_errors": self.parse_errors,
            "steps_without_turn": sum(step.turns == 0 and step.rewards is not None for step in self.steps),
            "tokens_prompt": self.tokens.prompt,
            "tokens_completion": self.tokens.completion,
        }
        if self.changed_files is not None and self.outcome.blame == "policy":
            numbers["changed_tools"] = float(bool(self.changed_tools))
        numbers |= {f"time_{phase}": took for phase, took in self.timings if took is not None}
        given = (only_finite(self.rewards) or {}) if self.outcome.trains else {}
        return numbers | {f"reward_{name}": value for name, value in given.items()}


class HasInfo(Protocol):
    """A verifiers trace, or one received from an environment server."""

    @property
    def info(self) -> Mapping[str, object]: ...


def record_of(trace: HasInfo) -> TrialRecord | None:
    """Return the record that the harness put on the trace, None if the trial never ended."""
    found = trace.info.get(INFO_KEY)
    return None if found is None else TrialRecord.model_validate(found)


def only_finite(rewards: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the finite rewards as floats; JSON has no other numbers."""
    if rewards is None:
        return None
    return {name: float(value) for name, value in rewards.items() if all_finite({name: value})}
