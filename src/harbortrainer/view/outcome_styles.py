"""The colour of each outcome, as a class of the stylesheet: whose doing it is decides."""

from collections.abc import Mapping

from harbortrainer.trials.outcome import Outcome
from harbortrainer.view.charts import Part


def outcome_style(name: str) -> str:
    """The class of an outcome; one that this release does not know is `o-other`."""
    if name == Outcome.completed:
        return "o-completed"
    try:
        found = Outcome(name)
    except ValueError:
        return "o-other"
    return f"o-{found.blame}" if found.blame != "policy" else "o-flagged" if found.flagged else "o-masked"


def outcome_parts(counts: Mapping[str, int]) -> list[Part]:
    """The parts of a bar, `completed` first, then as the table of outcomes has them."""
    order = {str(outcome): place for place, outcome in enumerate(Outcome)}
    names = sorted(counts, key=lambda name: order.get(name, len(order)))
    return [Part(name, outcome_style(name), counts[name]) for name in names]
