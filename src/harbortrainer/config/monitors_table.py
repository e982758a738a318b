"""`[monitors]` of a run file, and beside it our own `[prices]`: where figures go, and what a run costs."""

from pydantic import Field

from harbortrainer.config.table import Table

PROJECT = "prime-rl"
"""Prime-RL's own default."""


class WandbKeys(Table):
    """`[monitors.wandb]`; there is a W&B run when the table is there."""

    project: str | None = None
    """The project; `prime-rl`, as Prime-RL has it, when it is not given."""

    entity: str | None = None
    """The team or user; the key's own when it is not given."""

    name: str | None = None
    """The run's name there; this run's when it is not given."""

    group: str | None = None
    """The group of runs that it belongs to."""

    tags: list[str] | None = None
    """Its tags."""

    offline: bool | None = None
    """Write to the run's folder only, for `wandb sync`; `WANDB_MODE` decides where it is set."""


class MonitorsConfig(Table):
    """`[monitors]`."""

    wandb: WandbKeys | None = None
    """Log every line of `metrics.jsonl` to Weights & Biases (the extra `monitors`)."""


class Prices(Table):
    """`[prices]`: what is paid. Ours alone; Prime-RL never sees it."""

    prompt: float = Field(0.0, ge=0)
    """Dollars a million prompt tokens, the whole prompt at each turn."""

    sampled: float = Field(0.0, ge=0)
    """Dollars a million sampled tokens."""

    hour: float = Field(0.0, ge=0)
    """Dollars an hour of the machine."""

    def cost(self, *, prompt_tokens: float, sampled_tokens: float, seconds: float = 0.0) -> float:
        """Dollars for so many tokens and seconds."""
        return (prompt_tokens * self.prompt + sampled_tokens * self.sampled) / 1e6 + seconds * self.hour / 3600
