"""Style class of each outcome: the colour shows which component is to blame."""

from collections.abc import Mapping

from harbortrainer.trials.outcome import Outcome
from harbortrainer.view.charts import Part


def outcome_style(name: str) -> str:
    """Return the style class of an outcome; `o-other` for an unknown name."""
    if name == Outcome.completed:
        return "o-completed"
    try:
        found = Outcome(name)
    except ValueError:
        return "o-other"
    return f"o-{found.blame}" if found.blame != "policy" else "o-flagged" if found.flagged else "o-masked"


def outcome_parts(counts: Mapping[str, int]) -> list[Part]:
    """Return the parts of a bar: `completed` first, then in the order of `Outcome`."""
    order = {str(outcome): index for index, outcome in enumerate(Outcome)}
    names = sorted(counts, key=lambda name: order.get(name, len(order)))
    return [Part(name, outcome_style(name), counts[name]) for name in names]
