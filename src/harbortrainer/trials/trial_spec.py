"""One trial, as this project describes it; `trial_config` turns it into Harbor's `TrialConfig`.

Invariant: no secret of the model endpoint is in what Harbor writes to disk.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from harbortrainer.config.agent_table import TRAINABLE_TERMINUS, WITHOUT_MODEL
from harbortrainer.config.plugin import REWARD_BOUND, KeepTrials, Leftovers

DEFAULT_CONTEXT_LIMIT = 32768
"""Tokens of prompt and answer together, where nobody knows the model's."""


class ModelEndpoint(BaseModel):
    """The OpenAI-compatible server that the agent talks to."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The model's name, as the server knows it."""
    base_url: str
    """Ends in /v1."""
    api_key: SecretStr = SecretStr("EMPTY")
    """Never written to disk, never visible inside the sandbox for an agent that runs outside of it."""
    context_limit: int = DEFAULT_CONTEXT_LIMIT
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
    agent_kwargs: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the agent's class."""
    agent_env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the agent, visible inside the sandbox."""
    model: ModelEndpoint | None = None
    """Where the agent samples; None for an agent without a model."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns of the agent's, for agents of the Terminus family."""
    environment_type: str = "local"
    """`local`, an environment type of Harbor's, `module:Class`, or `auto` (`sandbox.environment_choice`)."""
    environment_kwargs: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the environment's class."""
    timeout_multiplier: float = Field(default=1.0, gt=0)
    """Scales every timeout of the task's."""
    agent_timeout_s: float | None = Field(default=None, gt=0)
    """Replaces the task's timeout of the agent."""
    reward_bound: float = Field(default=REWARD_BOUND, gt=0)
    """How far from zero a reward may be; one beyond is a `verifier_error`."""
    leftovers: Leftovers = "keep"
    """What becomes of processes that the agent left running, when its sandbox is graded in."""
    keep_trials: KeepTrials = "all"
    """Whose trial folders stay: all, those whose outcome does not train, none."""

    @property
    def asks_a_model(self) -> bool:
        """Whether the agent calls a model, and takes a model's keyword arguments."""
        return self.model is not None and self.agent not in WITHOUT_MODEL
