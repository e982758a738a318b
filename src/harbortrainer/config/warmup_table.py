"""The `[warmup]` table of a run file, and what `harbortrainer warmup` takes.

Ours alone: Prime-RL never sees it. `family`, `tasks` or `run` says what is learned from. Light: no torch, no harbor.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue, model_validator

from harbortrainer.config.table import Table


class WarmupConfig(Table):
    """How a policy is warmed up, supervised, before it is trained by reinforcement."""

    model: str | None = None
    """The model to start from, a hub id or a folder; a family may make one of its own where there is none."""

    family: Path | None = None
    """A Python file with `make_policy()`, beside the tasks that it makes a policy for."""

    tasks: Path | None = None
    """A folder of Harbor tasks with oracle solutions; each is replayed in a real trial to get its transcript."""

    run: Path | None = None
    """The folder of a run whose good trials are learned (rejection sampling), tasks of several steps too."""

    min_reward: float = 1.0
    """With a run: the least reward of a trial that is learned."""

    heldout: Path | None = None
    """A folder of tasks that must not be learned from; finding one of them in the transcripts is an error."""

    steps: int = Field(400, ge=1)
    """Optimizer steps of supervised training at most."""

    batch_size: int = Field(32, ge=1)
    """Transcripts an optimizer step."""

    lr: float = Field(3e-3, gt=0)
    """Peak learning rate (AdamW); right for the tiny model, 1e-5 (or 1e-4 with a LoRA) suits a real one."""

    lora_rank: int = Field(0, ge=0)
    """Train a LoRA of this rank and merge it at the end; 0 trains every weight."""

    success: tuple[float, float] = (0.2, 0.4)
    """With a family: where the mean reward of the warmed-up policy must lie, so that the trials of a group differ."""

    trials: int = Field(64, ge=0)
    """With a family: real trials that measure the success at the end; 0 trusts the likelihood of the solutions."""

    environment_type: str = "local"
    """The sandbox of those trials, and of replayed solutions."""

    environment_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Extra keyword arguments of its class."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(given is not None for given in (self.family, self.tasks, self.run)) != 1:
            raise ValueError("give either family or tasks, or a run")
        if self.tasks is not None and self.model is None:
            raise ValueError("tasks goes with model: what their solutions are taught to")
        if self.lora_rank and self.family is not None:
            raise ValueError("lora_rank goes with tasks or a run; a family trains every weight")
        if self.heldout is not None and self.family is None:
            raise ValueError("heldout goes with family; with tasks, point at a folder without them")
        low, high = self.success
        if not 0 < low < high < 1:
            raise ValueError("success must be two rising numbers between 0 and 1")
        return self
