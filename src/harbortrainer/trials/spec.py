"""One trial, as this project describes it; `trial_config` turns it into Harbor's `TrialConfig`.

Invariant: no secret of the model endpoint is in what Harbor writes to disk.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

TRAINABLE_TERMINUS = "harbortrainer.trials.agent:TrainableTerminus2"

type KeepTrials = Literal["all", "failed", "none"]


class ModelEndpoint(BaseModel):
    """The OpenAI-compatible server that the agent talks to."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The model's name, as the server knows it."""
    base_url: str
    """Ends in /v1."""
    api_key: SecretStr = SecretStr("EMPTY")
    """Never written to disk, never visible inside the sandbox for an agent that runs outside of it."""
    context_limit: int = 32768
    """Tokens of prompt and answer together."""
    output_limit: int | None = None
    """Tokens of one answer; told to the model when an answer was cut."""


class TrialSpec(BaseModel):
    """One trial: the task, the agent, the sandbox, and what is kept."""

    model_config = ConfigDict(extra="forbid")

    task_dir: Path
    """The task's folder, in Harbor's format."""
    trials_dir: Path
    """Harbor's folder of this trial is made inside."""
    task_key: str = ""
    """Hash of the task's content, copied to the record."""
    trial_name: str = ""
    """Name of the trial's folder; Harbor makes one up when empty."""
    agent: str = TRAINABLE_TERMINUS
    """A name that Harbor knows (`oracle`, `nop`, `terminus-2`, ...) or `module:Class`."""
    agent_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the agent's class."""
    agent_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent, visible inside the sandbox."""
    model: ModelEndpoint | None = None
    """Where the agent samples; None for an agent without a model."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of the agent's, for agents of the Terminus family."""
    environment_type: str = "local"
    """`local`, an environment type of Harbor's, or `module:Class`."""
    environment_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    timeout_multiplier: float = Field(default=1.0, gt=0)
    """Scales every timeout of the task's."""
    agent_timeout_s: float | None = Field(default=None, gt=0)
    """Replaces the task's timeout of the agent."""
    keep_trials: KeepTrials = "all"
    """Whose trial folders stay: all, those whose outcome does not train, none."""
