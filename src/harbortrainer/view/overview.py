"""The first page: what the run came to, how sure that is, and where its time and its trials went."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harbortrainer.estimates.interval import Estimate, mean_reward
from harbortrainer.estimates.repeated import RepeatedPass, repeated_passes
from harbortrainer.view.charts import Mark, Part, Series, line_chart, spark, split_bar, stacked_columns
from harbortrainer.view.held_out import HeldOut, held_out
from harbortrainer.view.outcome_styles import outcome_parts
from harbortrainer.view.shown_trial import OPEN
from harbortrainer.view.spoken import reward
from harbortrainer.view.svg_drawing import short
from harbortrainer.view.time_spent import of_the_trainer, run_seconds, trial_seconds
from harbortrainer.view.trial_filter import TrialFilter
from harbortrainer.view.trial_store import MetricRow, TrialStore

ALL = "train/agg/all/agent/"
HEALTH = (
    ("staleness/mean", "staleness", "policy versions between sampling and training, mean over tokens"),
    ("mismatch_kl/all/mean", "mismatch", "KL between the policy that sampled and the one that trains"),
    ("entropy/all/mean", "entropy", "how undecided the policy is, nats a token"),
    ("optim/grad_norm", "gradient norm", "size of the update"),
    (f"{ALL}solved_some", "groups with a signal", "share of groups in which some trials were solved and some were not"),
    (f"{ALL}is_truncated/mean", "cut by a limit", "share of trials that a limit of turns, context or length ended"),
    ("time/step", "seconds a step", "wall clock"),
    ("cost/step", "dollars a step", "at the prices of the run file"),
    ("cost/solved_task", "dollars a solved task", "at the prices of the run file"),
)


@dataclass(frozen=True, slots=True)
class Health:
    """A figure of every step, small."""

    name: str
    means: str
    last: str
    chart: Markup


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole, with the way to its trials."""

    part: Part
    percent: float
    query: str = ""
    """Of the address of these trials; empty where there is no such page."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All that the first page shows."""

    held_out: HeldOut
    """Of a run."""
    estimate: Estimate | None
    """Of an evaluation: its mean reward."""
    passes: Sequence[RepeatedPass]
    """Of an evaluation."""
    last_reward: float | None
    """Of all trials of the last step."""
    last_step: int | None
    cost: float | None
    """Dollars so far; None where no prices are set."""
    trials: int
    lost: int
    """Trials without a reward."""
    reward_chart: Markup
    outcome_bar: Markup
    outcome_chart: Markup
    outcomes: Sequence[Share]
    fate_bar: Markup
    fates: Sequence[Share]
    run_bar: Markup
    run_time: Sequence[Share]
    trial_bar: Markup
    trial_time: Sequence[Share]
    health: Sequence[Health]


def overview_of(store: TrialStore) -> Overview:
    """The first page of what is in the store."""
    metrics, evaluations = store.metrics(), held_out(store)
    is_run = store.head().kind != "evaluation"
    totals: Counter[str] = Counter()
    for counts in store.outcomes().values():
        totals.update(counts)
    rewards: dict[str, list[float]] = {}
    for kind, step in () if is_run else store.outcomes():
        for key, own in store.rewards(kind, step).items():
            rewards.setdefault(key, []).extend(own)
    trained, outcomes = reward_marks(metrics), outcome_parts(totals)
    fates, run_time, trial_time = fate_parts(store.fates()), run_seconds(metrics), trial_seconds(store.seconds())
    return Overview(
        held_out=evaluations,
        estimate=None if is_run else mean_reward(rewards),
        passes=[] if is_run else repeated_passes(rewards),
        last_reward=trained[-1].value if trained else None,
        last_step=int(trained[-1].step) if trained else None,
        cost=last_value(metrics, "cost/total"),
        trials=sum(totals.values()),
        lost=store.found(TrialFilter(reward="none"))[1],
        reward_chart=_reward_chart(trained, evaluations) if is_run else Markup(""),
        outcome_bar=split_bar(outcomes, label="Shares of outcomes"),
        outcome_chart=_outcome_chart(store) if is_run else Markup(""),
        outcomes=[_share(part, outcomes, TrialFilter(outcome=part.name).query()) for part in outcomes],
        fate_bar=split_bar(fates, label="What became of the training trials"),
        fates=[_share(part, fates, TrialFilter(trained=_asked(part.name)).query()) for part in fates],
        run_bar=split_bar(run_time, label="Where the run's time went"),
        run_time=[_share(part, run_time) for part in run_time],
        trial_bar=split_bar(trial_time, label="Where the trials' time went"),
        trial_time=[_share(part, trial_time) for part in trial_time],
        health=list(_health(metrics)),
    )


def reward_marks(metrics: Sequence[MetricRow]) -> list[Mark]:
    """The mean reward of all trials that came back for a step, without a signal in their group too."""
    found = []
    for row in metrics:
        mean, trials = row.get(f"{ALL}reward/mean"), row.get("progress/rollouts")
        if isinstance(mean, int | float) and isinstance(step := row["step"], int):
            of = f", {trials:g} trials" if isinstance(trials, int | float) else ""
            found.append(Mark(step, float(mean), title=f"step {step}: {reward(float(mean))}{of}"))
    return found


def last_value(metrics: Sequence[MetricRow], key: str) -> float | None:
    """What a figure was last; None where it was never written."""
    found = (value for row in reversed(metrics) if isinstance(value := row.get(key), int | float))
    return next((float(value) for value in found), None)


def fate_parts(fates: Mapping[str, int]) -> list[Part]:
    """What became of training trials, those that trained first."""
    names = sorted(fates, key=lambda name: (name != "trained", -fates[name]))
    styles = {"trained": "f-trained", "failed": "f-failed", "too old": "f-old", "no signal in its group": "f-flat"}
    return [Part(name, styles.get(name, "f-other"), fates[name]) for name in names]


def _asked(fate: str) -> str:
    return "yes" if fate == "trained" else fate


def _share(part: Part, whole: Sequence[Part], query: str = "") -> Share:
    return Share(part, 100 * part.amount / (sum(one.amount for one in whole) or 1), query)


def _reward_chart(trained: Sequence[Mark], evaluations: HeldOut) -> Markup:
    series = [
        Series("training trials", "train", trained),
        Series("held-out tasks", "heldout", evaluations.marks, dots=True),
    ]
    return line_chart(series, label="Mean reward by step", y=(0.0, 1.0), width=1140, height=270)


def _outcome_chart(store: TrialStore) -> Markup:
    decided = [(step, counts) for (kind, step), counts in store.outcomes().items() if kind == "train" and step != OPEN]
    columns = [(step, outcome_parts(counts)) for step, counts in decided]
    return stacked_columns(columns, label="Shares of outcomes by step", width=560)


def _health(metrics: Sequence[MetricRow]) -> Iterator[Health]:
    for key, name, means in HEALTH:
        marks = [
            Mark(float(step), float(value))
            for row in metrics
            if (key != "time/step" or of_the_trainer(row))
            and isinstance(value := row.get(key), int | float)
            and isinstance(step := row["step"], int)
        ]
        if marks:
            yield Health(name, means, short(marks[-1].value), spark(marks, f"{name} by step"))
