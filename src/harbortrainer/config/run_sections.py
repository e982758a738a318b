"""Tables `[warmup]`, `[monitors]` and `[prices]` of a run file.

`[warmup]` and `[prices]` are our own; Prime-RL never sees them. This module imports neither torch nor harbor.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue, field_validator, model_validator

from harbortrainer.config.agent_table import PLAIN_AGENT, SHORT_NAMES, TRAINABLE_TERMINUS, is_class
from harbortrainer.config.plugin import AgentKeys, HarnessKeys, KnownEnvironmentType
from harbortrainer.config.table import Table, error_at

TAUGHT = frozenset({TRAINABLE_TERMINUS, PLAIN_AGENT})
"""Agents for which the warm-up makes demonstrations."""
_NAMES = SHORT_NAMES | {"terminus-2": TRAINABLE_TERMINUS}
"""Agents that answer alike, by the names that a user may write."""


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
    """With solutions: the agent to teach, `plain` or Terminus-2; in a run file, by default the one that it trains."""

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

    environment_type: KnownEnvironmentType = "local"
    """Sandbox type of these trials and of replayed solutions; in a run file, by default the one that it trains in."""

    environment_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra keyword arguments of the sandbox class. In a run file, by default those of training sources with this
    sandbox type."""

    trusted_tasks: list[str] = Field(default_factory=list)
    """Names or shell patterns of tasks that may access this machine. A warm-up on the training tasks has those of
    `env.agent.harness` by default."""

    @property
    def learns_solutions(self) -> bool:
        """Whether the policy learns the solutions of tasks: of a folder, or of the run's training tasks."""
        return self.family is None and self.run is None

    @field_validator("agent")
    @classmethod
    def _replace_short_name(cls, name: str) -> str:
        return _NAMES.get(name, name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(given is not None for given in (self.family, self.tasks, self.run)) > 1:
            raise ValueError("takes only one of family, tasks and run")
        if self.learns_solutions and self.model is None:
            raise ValueError("needs model, the model to train on the tasks' solutions")
        if self.target is not None and not (self.learns_solutions and self.trials):
            raise ValueError("target needs solutions of tasks, and trials of 1 or more")
        if self.agent not in TAUGHT:
            raise ValueError(f"cannot teach agent {self.agent!r}; use plain or terminus-2")
        if self.lora_rank and self.family is not None:
            raise ValueError("lora_rank needs tasks or run; a family always uses full fine-tuning")
        if self.heldout is not None and self.family is None:
            raise ValueError("heldout needs family; with tasks, use a folder without the held-out tasks")
        low, high = self.success
        if not 0 < low < high < 1:
            raise ValueError("success must be two increasing numbers between 0 and 1")
        return self


def as_in_training(warmup: WarmupConfig, trained: Sequence[AgentKeys]) -> WarmupConfig:
    """Return `[warmup]` with the keys that the file leaves out taken from training.

    Args:
        warmup: The table of the run file.
        trained: `env.agent` of each training source.

    Raises:
        ValidationError: The table contradicts a source, or the sources differ in a key that it leaves out.
    """
    harnesses = [agent.harness for agent in trained if agent.harness is not None]
    if not harnesses:
        return warmup
    given, update = warmup.model_fields_set, {}
    if warmup.learns_solutions:
        update["agent"] = _taught_agent(warmup, harnesses)
    if "environment_type" not in given:
        update["environment_type"] = _only(harnesses, "environment_type")
    kind = update.get("environment_type", warmup.environment_type)
    if "environment_kwargs" not in given and (alike := [one for one in harnesses if one.environment_type == kind]):
        update["environment_kwargs"] = _only(alike, "environment_kwargs")
    if "trusted_tasks" not in given and warmup.learns_solutions and warmup.tasks is None:
        update["trusted_tasks"] = _only(harnesses, "trusted_tasks")
    if update.get("agent") == PLAIN_AGENT and any(_turns(agent) > 1 for agent in trained):
        what = "the warm-up teaches the plain agent one answer per trial, but the run has more turns"
        raise error_at(("warmup", "agent"), PLAIN_AGENT, f"{what}; set env.agent.max_turns to 1, or remove [warmup]")
    return warmup.model_copy(update=update)


def _taught_agent(warmup: WarmupConfig, harnesses: Sequence[HarnessKeys]) -> str:
    """Return the agent to teach: the table's own, or the one that the run trains."""
    key, given = ("warmup", "agent"), "agent" in warmup.model_fields_set
    trained = {_NAMES.get(one.agent, one.agent) for one in harnesses}
    taught = sorted(trained & TAUGHT)
    if any(is_class(name) for name in trained - TAUGHT):  # a class may answer like Terminus-2
        return warmup.agent if given or not taught else taught[0]
    if not taught:
        what = f"the warm-up teaches plain or terminus-2, but the run trains {', '.join(sorted(trained))}"
        raise error_at(key, None, f"{what}; remove [warmup]")
    if not given and len(taught) > 1:
        raise error_at(key, None, "the training sources have different agents; set it to one of them")
    if given and warmup.agent not in taught:
        named = "plain" if PLAIN_AGENT in taught else "terminus-2"
        what = f"the warm-up would teach another agent than the run trains; set it to {named!r}, or leave it out"
        raise error_at(key, warmup.agent, what)
    return warmup.agent if given else taught[0]


def _only(harnesses: Iterable[HarnessKeys], key: str) -> object:
    """Return the value of a key in all sources."""
    values = [getattr(harness, key) for harness in harnesses]
    if any(value != values[0] for value in values):
        raise error_at(("warmup", key), None, f"the training sources have different {key}; set it for the warm-up")
    return values[0]


def _turns(agent: AgentKeys) -> int:
    limits = [agent.max_turns, agent.harness.max_turns if agent.harness is not None else None]
    return min((limit for limit in limits if limit is not None), default=1)


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
