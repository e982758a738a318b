"""Where the time went: the seconds of the run's own clock, and those of its trials, which overlap.

On Prime-RL the clock is the trainer's.
"""

from collections.abc import Mapping, Sequence

from harbortrainer.view.charts import Part
from harbortrainer.view.trial_store import MetricRow

_STEP = {
    "time/wait_for_rollouts": ("waiting for trials", "t-wait"),
    "time/wait_for_batch": ("waiting for trials", "t-wait"),
    "time/forward_backward": ("training", "t-train"),
    "time/score_again": ("proof", "t-proof"),
    "time/other_versions": ("proof", "t-proof"),
    "time/hand_over": ("handing the policy over", "t-hand"),
    "time/broadcast_weights": ("handing the policy over", "t-hand"),
    "time/eval": ("evaluation", "t-eval"),
}


def run_seconds(metrics: Sequence[MetricRow]) -> list[Part]:
    """The seconds of all steps, each in one part."""
    sums: dict[tuple[str, str], float] = {}
    whole = known = 0.0
    for row in metrics:
        for key, part in _STEP.items():
            took = _number(row.get(key))
            if key == "time/forward_backward":
                took -= _number(row.get("time/other_versions"))  # which is a part of it
            sums[part] = sums.get(part, 0.0) + took
            known += 0.0 if key == "time/eval" else took
        whole += _number(row.get("time/step")) if of_the_trainer(row) else 0.0
    found = [Part(name, style, amount) for (name, style), amount in sums.items() if amount > 0]
    return found + ([Part("the rest", "t-rest", whole - known)] if whole - known > 0.005 * whole > 0 else [])


def of_the_trainer(row: MetricRow) -> bool:
    """Whether a line is about a step's own clock; Prime-RL's orchestrator has another, beside the trainer's."""
    return "time/pack" not in row


def trial_seconds(seconds: Mapping[str, float]) -> list[Part]:
    """The seconds of trials, cut so that no second is in two parts."""
    setup, agent_setup, agent, model, verifier, total = (
        seconds.get(phase, 0.0)
        for phase in ("environment_setup", "agent_setup", "agent_execution", "model", "verifier", "total")
    )
    parts = [
        Part("sandbox set-up", "t-setup", setup),
        Part("agent set-up", "t-agent", agent_setup),
        Part("model", "t-model", min(model, agent)),
        Part("terminal and agent", "t-terminal", max(0.0, agent - model)),
        Part("verifier", "t-verifier", verifier),
        Part("the rest", "t-rest", max(0.0, total - setup - agent_setup - agent - verifier)),
    ]
    return [part for part in parts if part.amount > 0]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
