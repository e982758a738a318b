"""`[orchestrator.train.source.curriculum]`: which task is drawn next, and which finished groups train.

Names, defaults and meaning are Prime-RL's (`prime_rl/configs/orchestrator.py` at commit 559b44772).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from harbortrainer.config.table import Table


class StandardSampling(Table):
    """`sampler` of type standard, the default: each task once an epoch."""

    type: Literal["standard"] = "standard"
    """Every task comes once an epoch."""


class PoolConfig(Table):
    """One entry of `sampler.pools`."""

    threshold: float
    """The largest mean reward of a group that still puts its task into this pool."""

    weight: float = Field(ge=0)
    """How likely each task of the pool is drawn, next to the others; 1 is the weight of a task not played yet."""


def _pools() -> dict[str, PoolConfig]:
    return {
        "hard": PoolConfig(threshold=0.25, weight=0.2),
        "normal": PoolConfig(threshold=0.75, weight=1.0),
        "easy": PoolConfig(threshold=1.0, weight=0.2),
    }


class PoolSampling(Table):
    """`sampler` of type difficulty_pool: tasks are drawn by the pool that their latest group put them into."""

    type: Literal["difficulty_pool"] = "difficulty_pool"
    """Tasks are drawn by the weight of their pool."""

    pools: dict[str, PoolConfig] = Field(default_factory=_pools)
    """The pools by name; a task is in the first whose threshold its mean reward does not exceed, or in the last."""

    seed: int = 42
    """Of the draws."""

    @model_validator(mode="after")
    def _can_be_drawn_from(self) -> Self:
        if not self.pools:
            raise ValueError("no pool; remove `pools` for hard, normal and easy")
        if len({pool.threshold for pool in self.pools.values()}) < len(self.pools):
            raise ValueError("two pools have one threshold; give each its own")
        if not any(pool.weight for pool in self.pools.values()):
            raise ValueError("every pool has the weight 0; give one of them a larger weight")
        return self


class GateConfig(Table):
    """One entry of `gates`: a group whose advantages all lie in a range does not train, and is replaced."""

    type: Literal["advantage_range"] = "advantage_range"
    """The only kind there is."""

    reject_min: float = 0.0
    """The range's lower end, inclusive."""

    reject_max: float = 0.0
    """The range's upper end, inclusive; 0 to 0 are the groups in which all rewards are equal."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.reject_min > self.reject_max:
            raise ValueError(f"reject_min ({self.reject_min:g}) is above reject_max ({self.reject_max:g})")
        return self


class CurriculumConfig(Table):
    """`[orchestrator.train.source.curriculum]`."""

    sampler: Annotated[StandardSampling | PoolSampling, Field(discriminator="type")] = StandardSampling()
    """Which task is drawn next."""

    gates: dict[str, GateConfig] = Field(default_factory=dict)
    """Named gates; a group trains when each of them admits it."""
