"""`[orchestrator.algo]` (advantages, ECHO) and `[orchestrator.train.source.curriculum]` (task sampling, group filters).

Names, defaults and meaning are Prime-RL's at commit 559b44772 (`prime_rl/configs/{algorithm,orchestrator}.py`).
`length_weighted_baseline` and `loss_aggregation` are those of newer releases.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from harbortrainer.config.table import Table

ALGORITHMS = "grpo", "echo", "max_rl"
"""Supported algorithms: they compare the trials of a group of one agent."""

PRIME_RL_ONLY = {
    "rae": "needs several agents that play against each other",
    "hierarchical_grpo": "needs a proposer and solvers",
    "opd": "needs a teacher that scores tokens",
    "opsd": "needs a demonstration of each task",
    "sft": "needs a teacher that plays the tasks",
}
"""Unsupported algorithms of the pinned schema and the reason; `harbor_env` has one agent and no teacher."""


class LengthPenalty(Table):
    """`[orchestrator.algo.length_penalty]`: reward penalty for long trials, off by default."""

    type: Literal["linear"] = "linear"
    """The only type."""

    num_output_tokens_weight: float = Field(0.25, ge=0, allow_inf_nan=False)
    """Weight of the number of sampled tokens, relative to the group's maximum."""

    num_input_tokens_weight: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Weight of the number of tokens that were not sampled, relative to the group's maximum."""

    num_turns_weight: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Weight of the number of turns, relative to the group's maximum."""


class EchoRole(Table):
    """`[orchestrator.algo.roles.<role>]`."""

    alpha: float = Field(0.1, gt=0)
    """Weight of the cross-entropy per token of this role."""


class EchoRoles(Table):
    """`[orchestrator.algo.roles]`: roles whose messages the model learns to predict."""

    system: EchoRole | None = None
    """System messages after the first answer."""

    user: EchoRole | None = None
    """User messages. Terminus-2 sends the terminal's output as user messages."""

    assistant: EchoRole | None = None
    """Assistant messages that were rewritten and therefore not sampled."""

    tool: EchoRole | None = None
    """Tool results."""

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        if not self.weights:
            raise ValueError("has no role; set one of user, tool, system and assistant")
        return self

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each set role."""
        return {name: role.alpha for name, role in self if role is not None}


class NamedAlgo(Table):
    """`[orchestrator.algo]`: name of the algorithm and roles of ECHO."""

    type: str = "grpo"
    """Name of the algorithm."""

    roles: EchoRoles | None = None
    """For echo: roles to predict; by default tool messages with alpha = 0.1."""

    @property
    def role_weights(self) -> Mapping[str, float]:
        """Weight of the cross-entropy by role; empty without ECHO."""
        return (self.roles or EchoRoles(tool=EchoRole())).weights if self.type == "echo" else {}


class Algo(NamedAlgo):
    """`[orchestrator.algo]`: a supported algorithm."""

    type: str = "grpo"
    """grpo: advantage = reward - group mean. echo: as grpo, plus cross-entropy on the environment's messages after the
    first answer. max_rl: advantage = (reward - group mean) / group mean."""

    length_penalty: LengthPenalty | None = None
    """Penalty on the reward for length, applied before the group mean. Not available with max_rl."""

    length_weighted_baseline: bool = False
    """Weight each trial by its number of sampled tokens in the group mean. Not available with max_rl."""

    loss_aggregation: Literal["token", "sequence", "prompt"] = "token"
    """What has equal weight in the loss: each trained token, each trial (sequence) or each group (prompt). Prime-RL has
    no sequence. max_rl has only token."""

    @field_validator("type", mode="before")
    @classmethod
    def _check_supported(cls, name: object) -> object:
        if name in ALGORITHMS:
            return name
        reason = PRIME_RL_ONLY.get(str(name))
        if reason is None:
            raise ValueError(f"unknown algorithm {name!r}; set {', '.join(ALGORITHMS)}")
        raise ValueError(
            f"{name} {reason} and is not supported by the embedded engine; "
            f"set {', '.join(ALGORITHMS)}, or run with --engine prime-rl"
        )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.roles is not None and self.type != "echo":
            raise ValueError(f"{self.type} has no roles; set type = 'echo', or remove them")
        if self.length_penalty is not None and self.type == "max_rl":
            raise ValueError("max_rl has no length_penalty; set type = 'grpo', or remove it")
        if self.type == "max_rl" and (self.length_weighted_baseline or self.loss_aggregation != "token"):
            raise ValueError(
                "max_rl has no length_weighted_baseline, and only loss_aggregation = 'token'; set type = 'grpo', or "
                "remove it"
            )
        return self


class StandardSampling(Table):
    """`sampler` of type standard, the default."""

    type: Literal["standard"] = "standard"
    """Each task is drawn once per epoch."""


class PoolConfig(Table):
    """One entry of `sampler.pools`."""

    threshold: float
    """Maximum mean reward of a task's latest group for this pool."""

    weight: float = Field(ge=0)
    """Sampling weight of each task in the pool; tasks without a trial have weight 1."""


def _pools() -> dict[str, PoolConfig]:
    return {
        "hard": PoolConfig(threshold=0.25, weight=0.2),
        "normal": PoolConfig(threshold=0.75, weight=1.0),
        "easy": PoolConfig(threshold=1.0, weight=0.2),
    }


class PoolSampling(Table):
    """`sampler` of type difficulty_pool: the mean reward of its latest group puts a task into a pool."""

    type: Literal["difficulty_pool"] = "difficulty_pool"
    """Tasks are drawn with the weight of their pool."""

    pools: dict[str, PoolConfig] = Field(default_factory=_pools)
    """Pools by name. A task is in the first pool whose threshold its mean reward does not exceed, else in the last."""

    seed: int = 42
    """Seed of the sampler."""

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        if not self.pools:
            raise ValueError("has no pool; remove `pools` for the defaults hard, normal and easy")
        if len({pool.threshold for pool in self.pools.values()}) < len(self.pools):
            raise ValueError("two pools have the same threshold; give each its own")
        if not any(pool.weight for pool in self.pools.values()):
            raise ValueError("every pool has weight 0; give one of them a larger weight")
        return self


class GateConfig(Table):
    """One entry of `gates`: drops and replaces a group whose advantages all lie in a range."""

    type: Literal["advantage_range"] = "advantage_range"
    """The only type."""

    reject_min: float = 0.0
    """Lower end of the range, inclusive."""

    reject_max: float = 0.0
    """Upper end of the range, inclusive. The range 0 to 0 drops groups with equal rewards."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.reject_min > self.reject_max:
            raise ValueError(f"reject_min ({self.reject_min:g}) is above reject_max ({self.reject_max:g})")
        return self


class CurriculumConfig(Table):
    """`[orchestrator.train.source.curriculum]`."""

    sampler: Annotated[StandardSampling | PoolSampling, Field(discriminator="type")] = StandardSampling()
    """Sampling of tasks."""

    gates: dict[str, GateConfig] = Field(default_factory=dict)
    """Gates by name. A group is trained on if every gate admits it."""
