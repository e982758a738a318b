"""Progress of an active run or evaluation: its step, phases, trials in flight, and an estimate of the remaining time.

The phases come from `live.json`, which only this project's own engine and `harbortrainer eval` write. For a Prime-RL
run the step and the remaining time come from its metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harbortrainer.runs.live_status import ActiveTrial, LiveStatus, Phase
from harbortrainer.view.index import MetricRow
from harbortrainer.view.overview import is_trainer_row
from harbortrainer.view.queries import IndexedRun
from harbortrainer.view.run_config import EvalSchedule, eval_schedule, value_of

RECENT_STEPS = 5
"""Steps whose median duration is the estimate of a step."""
MAX_TRIALS = 12
"""Trials in flight that are listed."""
STEPS = "steps"
"""Name of the phase that counts the steps."""
EVALUATING = "evaluating"
"""Name of the phase of `harbortrainer eval`."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What the metrics of a run say about its speed."""

    step: int
    """The last finished step."""
    step_s: float | None
    """Seconds of a step; None before the first."""
    eval_s: float
    """Seconds of an evaluation; 0 before the first."""
    evaluated: frozenset[int]
    """Policy versions with a finished evaluation."""
    since_last_s: float
    """Seconds since the last finished step or evaluation."""


def run_times(metrics: Sequence[MetricRow], *, since_last_s: float) -> RunTimes:
    """Return the times of a run from its metrics."""
    rows = [row for row in metrics if "time/step" in row and is_trainer_row(row)]
    evaluations = [row for row in metrics if "time/eval" in row]
    seconds = [row["time/step"] for row in rows[-RECENT_STEPS:]]
    return RunTimes(
        step=max((int(row["step"]) for row in rows), default=0),
        step_s=median(seconds) if seconds else None,
        eval_s=evaluations[-1]["time/eval"] if evaluations else 0.0,
        evaluated=frozenset(int(row["step"]) for row in evaluations),
        since_last_s=since_last_s,
    )


def remaining_s(times: RunTimes, max_steps: int | None, schedule: EvalSchedule | None) -> float | None:
    """Return the estimated seconds until the run ends; None if they are unknown.

    The steps that are left take the median of the last five, and each evaluation as long as the last one.
    """
    if times.step_s is None or max_steps is None:
        return None
    due = [] if schedule is None else range(times.step, max_steps + 1)
    evaluations = sum(schedule is not None and schedule.due_after(step, max_steps) for step in due)
    evaluations -= times.step in times.evaluated
    steps_s, evals_s = (max_steps - times.step) * times.step_s, max(0, evaluations) * times.eval_s
    spent_s = min(times.since_last_s, times.step_s if steps_s else times.eval_s)
    return max(0.0, steps_s + evals_s - spent_s)


@dataclass(frozen=True, slots=True)
class PhaseView:
    """A phase on the page."""

    text: str
    done: int
    total: int | None
    took_s: float

    @property
    def percent(self) -> float | None:
        """Share of the phase that is done; None if its size is unknown."""
        return None if not self.total else min(100.0, 100 * self.done / self.total)


@dataclass(frozen=True, slots=True)
class Progress:
    """Values of the template of the progress."""

    phases: Sequence[PhaseView]
    elapsed_s: float | None
    """Seconds since the start of the run, earlier starts included; None if they are unknown."""
    remaining_s: float | None
    trials: Sequence[tuple[str, float]]
    """The oldest trials in flight: task and seconds since the start."""
    in_flight: int | None
    """Number of trials in flight; None if it is unknown."""


def progress_of(
    live: LiveStatus, times: RunTimes, *, max_steps: int | None, schedule: EvalSchedule | None, now: float
) -> Progress:
    """Return the progress of an active run or evaluation.

    Args:
        live: The status that it wrote; empty if it wrote none.
        times: Its times so far.
        max_steps: The run's last step.
        schedule: When it evaluates.
        now: The time, in seconds since the epoch.
    """
    known = bool(live.since)
    oldest: list[ActiveTrial] = sorted(live.trials, key=lambda trial: trial.since)
    return Progress(
        phases=[phase_view(phase, now) for phase in shown_phases(live, times, max_steps)],
        elapsed_s=max(0.0, now - live.since) if known else None,
        remaining_s=remaining_of_phase(live.phases, now) or remaining_s(times, max_steps, schedule),
        trials=[(trial.task, max(0.0, now - trial.since)) for trial in oldest[:MAX_TRIALS]],
        in_flight=len(oldest) if known else None,
    )


def shown_phases(live: LiveStatus, times: RunTimes, max_steps: int | None) -> list[Phase]:
    """Return the phases in words, the outermost first."""
    if not live.since:
        return [Phase(text="step", since=0.0, done=times.step, total=max_steps)]
    if not live.phases:
        return [Phase(text="starting: loading the tasks and libraries", since=live.since)]
    if live.phases[0].text != STEPS:
        return live.phases
    steps = live.phases[0].model_copy(update={"done": max(times.step, live.phases[0].done)})
    return [steps, *(live.phases[1:] or [Phase(text="training on the batch", since=0.0)])]


def phase_view(phase: Phase, now: float) -> PhaseView:
    """Return a phase as the page shows it."""
    took_s = max(0.0, now - phase.since) if phase.since else 0.0
    return PhaseView("steps finished" if phase.text == STEPS else phase.text, phase.done, phase.total, took_s)


def remaining_of_phase(phases: Sequence[Phase], now: float) -> float | None:
    """Return the remaining seconds of an evaluation of its own, at its speed so far; None for other phases."""
    if len(phases) != 1 or phases[0].text != EVALUATING or not phases[0].done or not phases[0].total:
        return None
    return (now - phases[0].since) / phases[0].done * (phases[0].total - phases[0].done)


def progress_of_run(store: IndexedRun, now: float) -> Progress | None:
    """Return the progress of a run or evaluation at a time in seconds since the epoch; None if it is not active."""
    if store.head().status != "running":
        return None
    config = store.config()
    max_steps = value_of(config, "max_steps")
    return progress_of(
        LiveStatus.read(store.path),
        run_times(store.metrics(), since_last_s=store.seconds_since_metrics(now)),
        max_steps=max_steps if isinstance(max_steps, int) else None,
        schedule=eval_schedule(config),
        now=now,
    )
