"""Which failed trials are played again, in the words of either verifiers release.

verifiers replays a whole agent run with a fresh trace when the trace ended with an error whose class is
listed, so the tokens of two attempts never meet in one trace. How often each outcome is worth another attempt
is the outcome table's; verifiers knows one number, so the error's class says whether this was the last
attempt. Invariant: an outcome that trains is no error.
"""

from collections import Counter
from dataclasses import dataclass, field

from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.errors import RolloutError

from harbortrainer.trials.outcome import TABLE, Outcome
from harbortrainer.trials.record import TrialRecord


class TrialRetriedError(RolloutError):
    """A trial failed through no fault of the policy's, and another attempt is worth it."""


class TrialFailedError(RolloutError):
    """A trial failed for good: its outcome is not retried, or was retried often enough."""


@dataclass
class Attempts:
    """The failures of one episode so far, by outcome."""

    failures: Counter[Outcome] = field(default_factory=Counter)

    def failed(self, outcome: Outcome) -> bool:
        """Count a failure; whether another attempt is due."""
        self.failures[outcome] += 1
        return self.failures[outcome] <= outcome.retries


def failure(record: TrialRecord | None, attempts: Attempts) -> RolloutError | None:
    """The error that a finished trial ends its trace with, None when its outcome trains.

    Args:
        record: The trial's; None when the trial never came to an end.
        attempts: The episode's, counted up by this call.
    """
    if record is None:
        return TrialFailedError(f"{Outcome.cancelled}: the trial was stopped before it came to an end")
    if record.outcome.trains:
        return None
    detail = f"{record.error.type}: {record.error.message}" if record.error else "no details were recorded"
    where = f" (task {record.task}{f', {record.trial_dir}' if record.trial_dir else ''})"
    error = TrialRetriedError if attempts.failed(record.outcome) else TrialFailedError
    return error(f"{record.outcome}: {detail}{where}")


def retry_config() -> RetryConfig:
    """The agent's retries (a list of names in verifiers 0.3, rules in 0.4)."""
    name, most = TrialRetriedError.__name__, sum(row.retries for row in TABLE.values())
    if "include" in RetryConfig.model_fields:
        return RetryConfig.model_validate({"max_retries": most, "include": [name]})
    return RetryConfig.model_validate({"rules": [{"type": name, "max_retries": most}]})
