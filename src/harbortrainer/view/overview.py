"""Values of the overview page: evaluations, the gain with its interval (`estimates/`), rewards, outcomes, time.

Time is given twice: wall-clock seconds of the run's steps, and summed seconds of its trials, which run in parallel.
For a Prime-RL run the wall clock is the trainer's.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from harbortrainer.estimates.interval import Estimate, RepeatedPass, mean_reward, repeated_passes
from harbortrainer.estimates.paired import PairedDifference, paired_difference
from harbortrainer.runs.provenance import evaluation_name
from harbortrainer.view.charts import (
    Mark,
    Part,
    Series,
    for_both_widths,
    line_chart,
    short_number,
    sparkline,
    split_bar,
    stacked_columns,
)
from harbortrainer.view.format import reward
from harbortrainer.view.index import MetricRow
from harbortrainer.view.outcome_styles import outcome_parts
from harbortrainer.view.queries import IndexedRun, TrialFilter
from harbortrainer.view.run_config import ConfigEntry, config_card, eval_schedule, shown
from harbortrainer.view.trial_view import UNDECIDED_STEP


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluations of a run."""

    name: str
    """What they are called (`provenance.evaluation_name`)."""
    steps: Sequence[int]
    """The policy versions that were evaluated."""
    estimates: Sequence[Estimate]
    """Mean reward of each evaluation."""
    gain: PairedDifference | None
    """Last minus first evaluation, on their common tasks; None with fewer than two evaluations."""

    @property
    def marks(self) -> list[Mark]:
        """The estimates as chart marks."""
        both = zip(self.steps, self.estimates, strict=True)
        return [
            Mark(
                step,
                found.mean,
                found.low,
                found.high,
                f"{self.name}, policy version {step}: {found}, {found.tasks} tasks",
            )
            for step, found in both
            if found.mean is not None
        ]

    @property
    def verdict(self) -> str:
        """Whether the gain is significant, in words; empty without a gain."""
        if self.gain is None:
            return ""
        tasks = f"{self.gain.tasks} task" + ("" if self.gain.tasks == 1 else "s")
        if self.gain.low is None:
            return f"{tasks} {'is' if self.gain.tasks == 1 else 'are'} too few for a confidence interval."
        if self.gain.significant:
            return f"Significant on {tasks} (95% CI excludes 0)."
        smallest = (
            ""
            if self.gain.min_detectable is None
            else f" Detectable with 80% power: {reward(self.gain.min_detectable)} or more."
        )
        return f"Not significant on {tasks} (95% CI includes 0).{smallest}"


def all_rewards(store: IndexedRun) -> dict[str, list[float]]:
    """Return the rewards of all graded trials of an evaluation, by task key."""
    rewards: dict[str, list[float]] = {}
    for kind, step in store.outcomes():
        for key, own in store.rewards(kind, step).items():
            rewards.setdefault(key, []).extend(own)
    return rewards


def evaluations_of(store: IndexedRun) -> Evaluations:
    """Return the evaluations of a run, computed from its trials."""
    steps = [step for kind, step in store.outcomes() if kind == "eval" and step != UNDECIDED_STEP]
    rewards = [store.rewards("eval", step) for step in steps]
    gain = paired_difference(rewards[0], rewards[-1]) if len(steps) > 1 else None
    return Evaluations(evaluation_name(store.path), steps, [mean_reward(own) for own in rewards], gain)


_STEP_PARTS = {
    "time/wait_for_rollouts": ("waiting for trials", "t-wait"),
    "time/wait_for_batch": ("waiting for trials", "t-wait"),
    "time/forward_backward": ("training", "t-train"),
    "time/score_again": ("log-probability check", "t-proof"),
    "time/other_versions": ("log-probability check", "t-proof"),
    "time/hand_over": ("weight sync", "t-hand"),
    "time/broadcast_weights": ("weight sync", "t-hand"),
    "time/eval": ("evaluation", "t-eval"),
}


def run_seconds(metrics: Sequence[MetricRow]) -> list[Part]:
    """Return the seconds of all steps, split into disjoint parts."""
    sums: dict[tuple[str, str], float] = {}
    whole = known = 0.0
    for row in metrics:
        for key, part in _STEP_PARTS.items():
            took = row.get(key, 0.0)
            if key == "time/forward_backward":
                took -= row.get("time/other_versions", 0.0)  # included in forward_backward
            sums[part] = sums.get(part, 0.0) + took
            known += 0.0 if key == "time/eval" else took
        whole += row.get("time/step", 0.0) if is_trainer_row(row) else 0.0
    found = [Part(name, style, amount) for (name, style), amount in sums.items() if amount > 0]
    return found + ([Part("other", "t-rest", whole - known)] if whole - known > 0.005 * whole > 0 else [])


def is_trainer_row(row: MetricRow) -> bool:
    """Return whether a line is not from Prime-RL's orchestrator, whose clock differs from the trainer's."""
    return "time/pack" not in row


def trial_seconds(seconds: Mapping[str, float]) -> list[Part]:
    """Return the seconds of trials, split into disjoint parts."""
    setup, agent_setup, agent, model, verifier, total = (
        seconds.get(phase, 0.0)
        for phase in ("environment_setup", "agent_setup", "agent_execution", "model", "verifier", "total")
    )
    parts = [
        Part("sandbox setup", "t-setup", setup),
        Part("agent setup", "t-agent", agent_setup),
        Part("model", "t-model", min(model, agent)),
        Part("agent and terminal", "t-terminal", max(0.0, agent - model)),
        Part("verifier", "t-verifier", verifier),
        Part("other", "t-rest", max(0.0, total - setup - agent_setup - agent - verifier)),
    ]
    return [part for part in parts if part.amount > 0]


ALL = "train/agg/all/agent/"
METRIC_CHARTS = (
    ("staleness/mean", "staleness", "policy versions between sampling and training, mean over tokens"),
    ("mismatch_kl/all/mean", "mismatch KL", "KL between the policy that sampled and the policy in training"),
    ("entropy/all/mean", "entropy", "policy entropy, nats per token"),
    ("optim/grad_norm", "gradient norm", "norm of the gradient"),
    (f"{ALL}solved_some", "mixed groups", "share of groups with solved and unsolved trials"),
    (f"{ALL}is_truncated/mean", "truncated", "share of trials that reached a limit on turns, context or length"),
    ("time/step", "seconds per step", "wall clock"),
    ("cost/step", "dollars per step", "at the prices in the run file"),
    ("cost/solved_task", "dollars per solved task", "at the prices in the run file"),
)


@dataclass(frozen=True, slots=True)
class MetricChart:
    """A small chart of one metric by step."""

    name: str
    meaning: str
    last: str
    chart: Markup


@dataclass(frozen=True, slots=True)
class LogprobCheck:
    """Results of the embedded engine's log-probability check. A failed check of the training data stops the run."""

    failed: tuple[int, str] | None
    """Step and message of the check that stopped the run; None if every step passed."""
    steps: int
    """Number of steps that passed."""
    largest: float
    """Largest difference between a recorded and a recomputed log-probability; 0 if no step passed."""
    spread: float | None
    """Largest difference of rescored tokens over the sampler's own noise; None if none were rescored."""
    rescored: float
    """Share of the last step's trained tokens that the sampler scored again."""


def logprob_check(metrics: Sequence[MetricRow], failed: tuple[int, str] | None = None) -> LogprobCheck | None:
    """Return the results of the log-probability check; None if the run has none.

    Args:
        metrics: The lines of `metrics.jsonl`.
        failed: Step and message of the check that stopped the run.
    """
    rows = [row for row in metrics if "proof/logprob_diff/max" in row]
    if failed and any(row["step"] >= failed[0] for row in rows):
        failed = None  # a later start of the run has passed that step
    if not rows and failed is None:
        return None
    spreads = [row["proof/spread"] for row in rows if "proof/spread" in row]
    return LogprobCheck(
        failed=failed,
        steps=len(rows),
        largest=max((row["proof/logprob_diff/max"] for row in rows), default=0.0),
        spread=max(spreads, default=None),
        rescored=rows[-1].get("proof/rescored", 0.0) if rows else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole, with a link to its trials."""

    part: Part
    percent: float
    query: str = ""
    """Address parameters of these trials; empty if there is no such page."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Values of the overview template."""

    evaluations: Evaluations
    """Evaluations of a run."""
    estimate: Estimate | None
    """Mean reward of an evaluation; None for a run."""
    passes: Sequence[RepeatedPass]
    """pass@k and pass^k of an evaluation; empty for a run."""
    last_reward: float | None
    """Mean reward of all graded trials of the last step."""
    last_step: int | None
    cost: float | None
    """Dollars so far; None if no prices are set."""
    cost_per_solved: float | None
    """Dollars per solved task of the last step; None without prices."""
    check: LogprobCheck | None
    """Results of the log-probability check; None if the run has none."""
    config: Sequence[ConfigEntry]
    """Main keys of the config."""
    whole_config: Sequence[ConfigEntry]
    """All keys of the config."""
    trials: int
    evaluates: bool
    """Whether the config has an evaluation."""
    ungraded: int
    """Trials without a reward."""
    reward_chart: Markup
    outcome_bar: Markup
    outcome_chart: Markup
    outcomes: Sequence[Share]
    training_bar: Markup
    training: Sequence[Share]
    run_bar: Markup
    run_time: Sequence[Share]
    trial_bar: Markup
    trial_time: Sequence[Share]
    metric_charts: Sequence[MetricChart]


def overview_of(store: IndexedRun) -> Overview:
    """Return the values of the overview page."""
    metrics, evaluations = store.metrics(), evaluations_of(store)
    is_run = store.head().kind != "evaluation"
    totals: Counter[str] = Counter()
    for counts in store.outcomes().values():
        totals.update(counts)
    rewards = {} if is_run else all_rewards(store)
    trained, outcomes = reward_marks(metrics), outcome_parts(totals)
    training = training_parts(store.training_counts())
    run_time, trial_time = run_seconds(metrics), trial_seconds(store.seconds())
    return Overview(
        evaluations=evaluations,
        estimate=None if is_run else mean_reward(rewards),
        passes=[] if is_run else repeated_passes(rewards),
        last_reward=trained[-1].value if trained else None,
        last_step=int(trained[-1].step) if trained else None,
        cost=last_value(metrics, "cost/total"),
        cost_per_solved=last_value(metrics, "cost/solved_task"),
        check=logprob_check(metrics, store.head().failed_check),
        config=config_card(store.config()),
        whole_config=[ConfigEntry(key, [shown(value)]) for key, value in store.config().items()],
        trials=sum(totals.values()),
        evaluates=eval_schedule(store.config()) is not None,
        ungraded=store.find(TrialFilter(reward="none"))[1],
        reward_chart=_reward_chart(trained, evaluations) if is_run else Markup(""),
        outcome_bar=split_bar(outcomes, label="Shares of outcomes"),
        outcome_chart=_outcome_chart(store) if is_run else Markup(""),
        outcomes=[_share(part, outcomes, TrialFilter(outcome=part.name).query()) for part in outcomes],
        training_bar=split_bar(training, label="Trained and untrained trials"),
        training=[_share(part, training, TrialFilter(trained=_filter_value(part.name)).query()) for part in training],
        run_bar=split_bar(run_time, label="Wall-clock time of the run by part"),
        run_time=[_share(part, run_time) for part in run_time],
        trial_bar=split_bar(trial_time, label="Summed time of trials by phase"),
        trial_time=[_share(part, trial_time) for part in trial_time],
        metric_charts=list(_metric_charts(metrics)),
    )


def reward_marks(metrics: Sequence[MetricRow]) -> list[Mark]:
    """Return the mean reward of each step over all graded trials, including groups with equal rewards."""
    found = []
    for row in metrics:
        mean, trials = row.get(f"{ALL}reward/mean"), row.get("progress/rollouts")
        if mean is not None:
            of = f", {trials:g} trials" if trials is not None else ""
            found.append(Mark(row["step"], mean, title=f"step {row['step']}: {reward(mean)}{of}"))
    return found


def last_value(metrics: Sequence[MetricRow], key: str) -> float | None:
    """Return the last value of a metric; None if it was never logged."""
    return next((row[key] for row in reversed(metrics) if key in row), None)


def training_parts(counts: Mapping[str, int]) -> list[Part]:
    """Return the parts of the training bar, `trained` first."""
    names = sorted(counts, key=lambda name: (name != "trained", -counts[name]))
    styles = {"trained": "f-trained", "failed": "f-failed", "too old": "f-old", "no signal in its group": "f-flat"}
    return [Part(name, styles.get(name, "f-other"), counts[name]) for name in names]


def _filter_value(status: str) -> str:
    return "yes" if status == "trained" else status


def _share(part: Part, whole: Sequence[Part], query: str = "") -> Share:
    return Share(part, 100 * part.amount / (sum(one.amount for one in whole) or 1), query)


def _reward_chart(trained: Sequence[Mark], evaluations: Evaluations) -> Markup:
    series = [
        Series("training reward", "train", trained),
        Series(f"{evaluations.name} reward", "heldout", evaluations.marks, dots=True),
    ]
    return for_both_widths(lambda width: line_chart(series, label="Mean reward by step", width=width, height=270), 1140)


def _outcome_chart(store: IndexedRun) -> Markup:
    decided = [
        (step, counts)
        for (kind, step), counts in store.outcomes().items()
        if kind == "train" and step != UNDECIDED_STEP
    ]
    columns = [(step, outcome_parts(counts)) for step, counts in decided]
    return for_both_widths(lambda width: stacked_columns(columns, label="Shares of outcomes by step", width=width), 560)


def _metric_charts(metrics: Sequence[MetricRow]) -> Iterator[MetricChart]:
    for key, name, meaning in METRIC_CHARTS:
        marks = [
            Mark(row["step"], row[key]) for row in metrics if key in row and (key != "time/step" or is_trainer_row(row))
        ]
        if marks:
            yield MetricChart(name, meaning, short_number(marks[-1].value), sparkline(marks, f"{name} by step"))
