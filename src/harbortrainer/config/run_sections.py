"""Tables `[warmup]`, `[monitors]` and `[prices]` of a run file.

`[warmup]` and `[prices]` are our own; Prime-RL never sees them. This module imports neither torch nor harbor.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue, field_validator, model_validator

from harbortrainer.config.agent_table import PLAIN_AGENT, SHORT_NAMES, TRAINABLE_TERMINUS
from harbortrainer.config.table import Table

TAUGHT = frozenset({TRAINABLE_TERMINUS, PLAIN_AGENT})
"""Agents for which the warm-up makes demonstrations."""


class WarmupConfig(Table):
    """`[warmup]`: supervised training before reinforcement learning."""

    model: str | None = None
    """Model to start from: a hub id or a folder. Without it, a family can create its own model."""

    family: Path | None = None
    """Python file with `make_policy()`, next to the tasks that the policy is made for."""

    tasks: Path | None = None
    """Folder of Harbor tasks with oracle solutions; by default the tasks that the run trains on. Each solution is
    replayed in a real trial to get its transcript."""

    run: Path | None = None
    """Run folder whose good trials are trained on (rejection sampling). Multi-step tasks are supported."""

    agent: str = TRAINABLE_TERMINUS
    """With solutions: the agent to teach, `plain` or Terminus-2. A run must train the same one."""

    target: float | None = Field(None, gt=0, lt=1)
    """With solutions: stop at this success rate of sampled answers, measured in `trials` real trials every 5 steps."""

    min_reward: float = 1.0
    """With `run`: minimum reward of a trial to train on."""

    heldout: Path | None = None
    """Folder of held-out tasks. A held-out task among the transcripts is an error."""

    steps: int = Field(400, ge=1)
    """Maximum number of optimizer steps of supervised training."""

    batch_size: int = Field(32, ge=1)
    """Transcripts per optimizer step."""

    lr: float = Field(3e-3, gt=0)
    """Peak learning rate of AdamW. The default suits the tiny model; use 1e-5 (1e-4 with a LoRA) for a real one."""

    lora_rank: int = Field(0, ge=0)
    """Train a LoRA of this rank and merge it at the end; 0 means full fine-tuning."""

    success: tuple[float, float] = (0.2, 0.4)
    """With `family`: range for the mean reward of the warmed-up policy, so that rewards differ within a group."""

    trials: int = Field(64, ge=0)
    """Number of real trials of one measurement of the success: at the end with `family` (0 trusts the solutions'
    likelihood), and for `target`."""

    environment_type: str = "local"
    """Sandbox type of these trials and of replayed solutions."""

    environment_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra keyword arguments of the sandbox class."""

    trusted_tasks: list[str] = Field(default_factory=list)
    """Names or shell patterns of tasks that may access this machine, as in `env.agent.harness`."""

    @property
    def learns_solutions(self) -> bool:
        """Whether the policy learns the solutions of tasks: of a folder, or of the run's training tasks."""
        return self.family is None and self.run is None

    @field_validator("agent")
    @classmethod
    def _replace_short_name(cls, name: str) -> str:
        return SHORT_NAMES.get(name, name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(given is not None for given in (self.family, self.tasks, self.run)) > 1:
            raise ValueError("takes only one of family, tasks and run")
        if self.learns_solutions and self.model is None:
            raise ValueError("needs model, the model to train on the tasks' solutions")
        if self.target is not None and not (self.learns_solutions and self.trials):
            raise ValueError("target needs solutions of tasks, and trials of 1 or more")
        if self.agent not in TAUGHT:
            raise ValueError(f"cannot teach agent {self.agent!r}; use plain, or leave the key out for Terminus-2")
        if self.lora_rank and self.family is not None:
            raise ValueError("lora_rank needs tasks or run; a family always uses full fine-tuning")
        if self.heldout is not None and self.family is None:
            raise ValueError("heldout needs family; with tasks, use a folder without the held-out tasks")
        low, high = self.success
        if not 0 < low < high < 1:
            raise ValueError("success must be two increasing numbers between 0 and 1")
        return self


PROJECT = "prime-rl"
"""Prime-RL's default project."""


class WandbKeys(Table):
    """`[monitors.wandb]`; the table enables W&B logging."""

    project: str | None = None
    """W&B project; `prime-rl` by default, as in Prime-RL."""

    entity: str | None = None
    """W&B team or user; by default the owner of the API key."""

    name: str | None = None
    """Name of the W&B run; by default this run's name."""

    group: str | None = None
    """Group of W&B runs."""

    tags: list[str] | None = None
    """Tags of the W&B run."""

    offline: bool | None = None
    """Write only to the run folder, for `wandb sync`. The environment variable `WANDB_MODE` takes precedence."""


class MonitorsConfig(Table):
    """`[monitors]`."""

    wandb: WandbKeys | None = None
    """Log every line of `metrics.jsonl` to Weights & Biases (the extra `monitors`)."""


class Prices(Table):
    """`[prices]`: costs of tokens and machine time. Our own table; Prime-RL never sees it."""

    prompt: float = Field(0.0, ge=0)
    """Dollars per million prompt tokens; each turn counts its whole prompt."""

    sampled: float = Field(0.0, ge=0)
    """Dollars per million sampled tokens."""

    hour: float = Field(0.0, ge=0)
    """Dollars per machine hour."""

    def cost(self, *, prompt_tokens: float, sampled_tokens: float, seconds: float = 0.0) -> float:
        """Return the cost in dollars."""
        return (prompt_tokens * self.prompt + sampled_tokens * self.sampled) / 1e6 + seconds * self.hour / 3600
