"""Outcome of an episode that an environment server returned: from the trial's record, else from verifiers' error.

Training, its evaluations and `eval` use it.
"""

from typing import TYPE_CHECKING

from harbortrainer.trials.harbor_result import summarize_in_one_line
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode


def episode_outcome(episode: "WireEpisode", record: TrialRecord | None) -> tuple[Outcome, str | None]:
    """Return the outcome and the error message: from the trial's record if there is one, else from verifiers."""
    trace = episode.traces[0] if episode.traces else None
    last = (trace.last_error if trace else None) or episode.last_error
    error = _one_line(last.type, last.message) if last else None
    failed = not episode.ok or trace is None or not trace.ok
    if record is not None and not (failed and record.outcome.trains):
        return record.outcome, error
    return outcome_from_message(last.message if last else "") if failed else Outcome.completed, error


def _one_line(kind: str, message: str) -> str:
    """Return an error on one line; the type adds nothing to a message that names its outcome."""
    named = message.split(":", 1)[0] in list(Outcome)
    return summarize_in_one_line(message if named else f"{kind}: {message}")


def outcome_from_message(message: str) -> Outcome:
    """Return the outcome that an error message starts with (`sandbox_error: ...`), `agent_error` if there is none."""
    name = message.split(":", 1)[0].strip()
    return Outcome(name) if name in list(Outcome) and not Outcome(name).trains else Outcome.agent_error
