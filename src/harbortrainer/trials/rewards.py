"""The scalar that trains, out of a verifier's reward dictionary."""

from collections.abc import Mapping

from harbortrainer.trials.outcome import finite


def only_finite(rewards: Mapping[str, float] | None) -> dict[str, float] | None:
    """The rewards that are finite numbers, as plain floats: JSON has no others."""
    if rewards is None:
        return None
    return {name: float(value) for name, value in rewards.items() if finite({name: value})}


def scalar(rewards: Mapping[str, float] | None) -> float | None:
    """The key "reward" when it is there, else the mean of all values.

    Returns:
        None when there are no rewards or one of them is not a finite number: that is never a 0.

    Example:
        >>> scalar({"speed": 1.0, "style": 0.5})
        0.75
    """
    if rewards is None or not finite(rewards):
        return None
    if "reward" in rewards:
        return float(rewards["reward"])
    return sum(rewards.values()) / len(rewards)
