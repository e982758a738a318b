"""How an episode that came over the wire ended: the trial's own word for it, else what verifiers recorded.

Everything that plays through an environment server asks here: training, its evaluations, `eval`.
"""

from typing import TYPE_CHECKING

from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode


def blame(episode: "WireEpisode", record: TrialRecord | None) -> tuple[Outcome, str | None]:
    """Outcome and error of an episode: the trial's own word for it, else what verifiers recorded."""
    trace = episode.traces[0] if episode.traces else None
    last = (trace.last_error if trace else None) or episode.last_error
    error = " ".join(f"{last.type}: {last.message}".split())[:500] if last else None
    failed = not episode.ok or trace is None or not trace.ok
    if record is not None and not (failed and record.outcome.trains):
        return record.outcome, error
    return outcome_in(last.message if last else "") if failed else Outcome.completed, error


def outcome_in(message: str) -> Outcome:
    """The outcome an error's message starts with (`sandbox_error: ...`); without one the harness is to blame."""
    word = message.split(":", 1)[0].strip()
    return Outcome(word) if word in list(Outcome) and not Outcome(word).trains else Outcome.agent_error
