"""`[orchestrator.algo]`: what a trial's tokens are worth, and whether the model learns to predict what it was told.

Names, defaults and meaning are Prime-RL's (`prime_rl/configs/algorithm.py` at commit 559b44772).
"""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from harbortrainer.config.table import Table

ALGORITHMS = "grpo", "echo", "max_rl"
"""What compares the trials of one group, of one agent."""

PRIME_RLS_ALONE = {
    "rae": "is for several agents that play each other",
    "hierarchical_grpo": "is for a proposer and its solvers",
    "opd": "needs a teacher that scores",
    "opsd": "needs a demonstration of each task",
    "sft": "needs a teacher that plays",
}
"""The rest of the pinned schema, and why each is not here; `harbor_env` has one agent and no teacher."""


class LengthPenalty(Table):
    """`[orchestrator.algo.length_penalty]`: what is subtracted from a trial's reward for being long, off by
    default."""

    type: Literal["linear"] = "linear"
    """The only kind there is."""

    num_output_tokens_weight: float = Field(0.25, ge=0, allow_inf_nan=False)
    """Weight of the sampled tokens, relative to the group's largest count."""

    num_input_tokens_weight: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Weight of the tokens that were not sampled, relative to the group's largest count."""

    num_turns_weight: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Weight of the turns, relative to the group's largest count."""


class EchoRole(Table):
    """`[orchestrator.algo.roles.<role>]`."""

    alpha: float = Field(0.1, gt=0)
    """Weight of the cross-entropy of each token of this role."""


class EchoRoles(Table):
    """`[orchestrator.algo.roles]`: whose messages the model learns to predict; a role that is not set is left out."""

    system: EchoRole | None = None
    """System messages after the first answer."""

    user: EchoRole | None = None
    """Messages of the user, which is how Terminus-2 sends what the terminal says."""

    assistant: EchoRole | None = None
    """Answers that were rewritten, and so not sampled."""

    tool: EchoRole | None = None
    """Results of tool calls."""

    @model_validator(mode="after")
    def _someones(self) -> Self:
        if not self.weights:
            raise ValueError("no role is set; set one of user, tool, system and assistant")
        return self

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each role that is set."""
        return {name: role.alpha for name, role in self if role is not None}


class NamedAlgo(Table):
    """`[orchestrator.algo]`: which algorithm, and whose messages it learns to predict."""

    type: str = "grpo"
    """Its name."""

    roles: EchoRoles | None = None
    """echo only: whose messages; by default those of tools, with alpha = 0.1."""

    @property
    def role_weights(self) -> Mapping[str, float]:
        """By role, the weight of the cross-entropy of a token; empty without ECHO."""
        return (self.roles or EchoRoles(tool=EchoRole())).weights if self.type == "echo" else {}


class Algo(NamedAlgo):
    """`[orchestrator.algo]`: the group-relative algorithm."""

    type: str = "grpo"
    """grpo: advantage = reward minus the mean of the group. echo: the same, and cross-entropy on what the model is told
    after its first answer. max_rl: reward minus the mean, over the mean."""

    length_penalty: LengthPenalty | None = None
    """What a trial's reward loses for length before the mean is taken; none by default, and never with max_rl."""

    @field_validator("type", mode="before")
    @classmethod
    def _is_had_here(cls, name: object) -> object:
        if name in ALGORITHMS:
            return name
        why = PRIME_RLS_ALONE.get(str(name))
        if why is None:
            raise ValueError(f"there is no algorithm {name!r}; set {', '.join(ALGORITHMS)}")
        raise ValueError(
            f"{name} {why}: not on the embedded engine; set {', '.join(ALGORITHMS)}, or run with --engine prime-rl"
        )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.roles is not None and self.type != "echo":
            raise ValueError(f"{self.type} has no roles; set type = 'echo', or remove them")
        if self.length_penalty is not None and self.type == "max_rl":
            raise ValueError("max_rl has no length_penalty; set type = 'grpo', or remove it")
        return self
