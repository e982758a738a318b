"""What a trial's record becomes on the verifiers trace: its JSON, and its metrics."""

import math

from verifiers.v1.trace import Trace

from harbortrainer.trials.record import TrialRecord

INFO_KEY = "harbor"


def put_record(trace: Trace, record: TrialRecord) -> None:
    """Leave the record on the trace, as plain JSON, and its numbers among the metrics."""
    trace.info[INFO_KEY] = record.to_json()
    trace.record_metrics(metrics(record))


def record_of(trace: Trace) -> TrialRecord | None:
    """The record that the harness left on the trace, None when the trial never came to an end."""
    found = trace.info.get(INFO_KEY)
    return None if found is None else TrialRecord.model_validate(found)


def metrics(record: TrialRecord) -> dict[str, float]:
    """Numbers of one trial: `outcome_*` is 1.0 (its mean is a share), `time_*` are seconds."""
    numbers: dict[str, float] = {
        f"outcome_{record.outcome}": 1.0,
        "turns": record.turns,
        "parse_errors": record.parse_errors,
        "tokens_prompt": record.tokens.prompt,
        "tokens_completion": record.tokens.completion,
    }
    seconds = record.timings.model_dump()
    numbers |= {f"time_{phase}": took for phase, took in seconds.items() if took is not None}
    rewards = record.rewards or {}
    return numbers | {f"reward_{name}": value for name, value in rewards.items() if math.isfinite(value)}
