"""`[orchestrator.train.sampling]` and `[orchestrator.eval.sampling]`, and the request settings they stand for.

Training samples from the model's whole distribution at one temperature, since that is the distribution the
log-probabilities and the importance ratios belong to; evaluation may narrow it.
"""

from pydantic import Field

from harbortrainer.config.table import Table

TRAIN_EXTRA = {"top_k": -1, "min_p": 0.0, "return_token_ids": True}
"""What Prime-RL itself adds to every training request: sample from the whole distribution, return the ids."""


class TrainSampling(Table):
    """`[orchestrator.train.sampling]`."""

    temperature: float = Field(1.0, gt=0, le=2.0)
    """Temperature of the distribution that is sampled from, and that log-probabilities belong to."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of one answer; none means up to the context's end."""

    def to_sampling_args(self) -> dict[str, object]:
        """The settings of a request, in the names that Prime-RL gives verifiers."""
        args = self.model_dump(exclude_none=True)
        return args | {"top_p": 1.0, "logprobs": True, "extra_body": dict(TRAIN_EXTRA)}


class EvalSampling(Table):
    """`[orchestrator.eval.sampling]`; what is none is left to the server."""

    temperature: float | None = Field(None, ge=0, le=2.0)
    """Temperature; the server's own is 1.0. At 0 the likeliest token is taken."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""

    top_k: int | None = Field(None, ge=-1)
    """Sample from this many of the likeliest tokens; -1 means all."""

    min_p: float | None = Field(None, ge=0, le=1)
    """Leave out tokens less likely than this share of the likeliest one."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens of one answer; none means up to the context's end."""

    def to_sampling_args(self) -> dict[str, object]:
        """The settings of a request, in the names that Prime-RL gives verifiers; only what was set."""
        args = self.model_dump(include={"temperature", "top_p", "max_completion_tokens"}, exclude_none=True)
        extra = self.model_dump(include={"top_k", "min_p"}, exclude_none=True)
        return args | ({"extra_body": extra} if extra else {})
