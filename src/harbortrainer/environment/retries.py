"""Which failed trials are played again, in the words of either verifiers release.

verifiers replays a whole agent run with a fresh trace when the trace ends with an error whose class name is listed,
so tokens of two attempts never meet in one trace. Invariant: only `TrialRetried` and the errors that verifiers
itself records for the engine, the sandbox or the harness are listed; an outcome that trains raises nothing.
"""

from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.errors import RolloutError

MAX_RETRIES = 2


class TrialRetried(RolloutError):
    """A trial failed through no fault of the policy's, and another attempt is worth it."""


class TrialFailed(RolloutError):
    """A trial failed for good: its outcome is not retried, or was retried often enough."""


RETRIED_ERRORS = (TrialRetried.__name__,)


def retry_config(max_retries: int = MAX_RETRIES) -> RetryConfig:
    """The agent's retries (a list of names in verifiers 0.3, rules in 0.4)."""
    if "include" in RetryConfig.model_fields:
        return RetryConfig.model_validate({"max_retries": max_retries, "include": list(RETRIED_ERRORS)})
    return RetryConfig.model_validate(
        {"rules": [{"type": name, "max_retries": max_retries} for name in RETRIED_ERRORS]}
    )
