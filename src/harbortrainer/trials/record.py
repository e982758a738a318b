"""What is kept of a trial: its outcome, rewards, timings and counts. Plain JSON; it survives the wire.

Invariant: `reward` is a finite number when `outcome.trains`, and None otherwise.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harbortrainer.trials.outcome import Outcome


class Timings(BaseModel):
    """Seconds that each phase took; None when it did not happen. Steps of one trial are added up."""

    environment_setup: float | None = None
    agent_setup: float | None = None
    agent_execution: float | None = None
    model: float | None = None
    """Waiting for the model's answers; part of agent_execution."""
    verifier: float | None = None
    total: float | None = None


class Tokens(BaseModel):
    """Tokens that the model server counted."""

    prompt: int = 0
    completion: int = 0


class Failure(BaseModel):
    """The exception that Harbor recorded."""

    type: str
    message: str


class StepRecord(BaseModel):
    """One step of a multi-step trial."""

    name: str
    outcome: Outcome
    rewards: dict[str, float] | None = None


class TurnTokens(BaseModel):
    """What the engine sampled in one call.

    Args:
        prompt_ids: [P] token ids of the whole prompt.
        completion_ids: [C] sampled token ids.
        logprobs: [C] their log-probabilities.
        cut: The answer was cut at its length.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    cut: bool = False


class TrialRecord(BaseModel):
    """One trial, as it is put on `trace.info["harbor"]` and into the run folder."""

    model_config = ConfigDict(extra="forbid")

    outcome: Outcome
    task: str
    """Harbor's name of the task."""
    task_key: str = ""
    """Hash of the task's content."""
    trial_name: str = ""
    trial_dir: str | None = None
    """Harbor's folder of the trial; None after pruning."""
    rewards: dict[str, float] | None = None
    """What the verifier gave, by name, also when the outcome does not train; without what is not finite."""
    reward: float | None = None
    """The scalar that trains; None when the outcome does not train."""
    timings: Timings = Field(default_factory=Timings)
    turns: int = 0
    parse_errors: int = 0
    tokens: Tokens = Field(default_factory=Tokens)
    steps: list[StepRecord] = Field(default_factory=list)
    """Of a multi-step trial; empty for others."""
    error: Failure | None = None
    turn_tokens: list[TurnTokens] = Field(default_factory=list, exclude=True)
    """What the engine sampled, with `collect_rollout_details`. Not part of the JSON: megabytes."""

    @model_validator(mode="after")
    def _reward_iff_it_trains(self) -> Self:
        if self.outcome.trains != (self.reward is not None):
            raise ValueError(f"{self.outcome} with reward {self.reward}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, without `turn_tokens`."""
        return self.model_dump(mode="json")

    @classmethod
    def cancelled(cls, task: str, trial_dir: Path | None = None, **fields: Any) -> Self:
        """The record of a cancelled trial: `run_trial` raises `CancelledError` instead of returning one."""
        return cls(outcome=Outcome.cancelled, task=task, trial_dir=str(trial_dir) if trial_dir else None, **fields)
