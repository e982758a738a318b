"""Evaluation on held-out sources: rollouts, seeds, results and metrics.

Invariants:

- Rollouts and request seeds depend on the run's seed, the source, the task and the rollout's number only. Two
  evaluations of the same policy get the same samples.
- An evaluation measures one policy version: no weight update happens while it runs.
- A resume does not repeat an evaluation that is in `metrics.jsonl`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.rollout_client import RolloutClient, TaskStream, request_seed
from harbortrainer.engines.local.rollouts.batch import refuse_unstarted, sandbox_started
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.step_metrics import outcome_metrics
from harbortrainer.errors import RunStoppedError
from harbortrainer.estimates.interval import mean_reward, repeated_passes
from harbortrainer.runs.display import Bar, Display
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.provenance import evaluation_name
from harbortrainer.runs.summary import EvalResult, evaluated_sources
from harbortrainer.runs.transcript_files import TranscriptWriter
from harbortrainer.runs.trial_row import write_rows


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """One rollout of an evaluation."""

    source: str
    index: int
    seed: int


class Evaluator:
    """The evaluations of one run.

    Args:
        config: The run.
        run: Its folder.
        streams: The evaluation sources by name; empty means no evaluation.
        client: Runs the rollouts.
        transcripts: Keeps their transcripts.
        display: Progress and results.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        streams: Mapping[str, TaskStream],
        client: RolloutClient,
        transcripts: TranscriptWriter,
        display: Display,
    ) -> None:
        self.run, self.streams, self.client, self.display, self.seed = run, streams, client, display, config.seed
        self.transcripts = transcripts
        held_out = config.orchestrator.eval
        self.intervals = {source.resolved_name: source.interval for source in (held_out.source if held_out else [])}
        self.skip_first = held_out is not None and held_out.skip_first_step
        self.batch_size = config.orchestrator.batch_size
        self.any_trial_started = False
        """Whether a sandbox of this run's evaluations has started."""
        self.unstarted: list[Rollout] = []
        """Rollouts before the first one whose sandbox started."""
        self.evaluated = evaluated_sources(run)
        """Sources with an evaluation on disk, by step. They are read once: a long run's `metrics.jsonl` is large."""

    def due_sources(self, step: int, *, last: bool) -> list[str]:
        """Return the sources to evaluate after this step: all at step 0 and after the last, else the due ones.

        After the last step, all are evaluated again if the step's evaluation lacks one: the run's length was changed.
        """
        if step == 0 and self.skip_first and not last:
            return []
        wanted = list(self.streams) if last or step == 0 else sources_at(step, self.intervals)
        return [] if self.evaluated.get(step, set()) >= set(wanted) else wanted

    async def evaluate(self, step: int, names: Sequence[str]) -> None:
        """Evaluate policy version `step` on these sources and write the result to disk.

        Raises:
            RunStoppedError: No trial was graded, or no sandbox started in a batch's worth of trials.
        """
        started = time.monotonic()
        plans = plan_evaluation([self.streams[name] for name in names], seed=self.seed)
        with self.display.bar(f"evaluating after step {step}", len(plans)) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    trials = [group.create_task(self._run_plan(plan, bar)) for plan in plans]
            except ExceptionGroup as errors:  # the other trials are cancelled
                raise errors.exceptions[0] from None
        rollouts = [trial.result() for trial in trials]
        result = eval_result(rollouts)
        if not result.n:
            raise no_graded_trial_error(rollouts)
        numbers = eval_metrics(rollouts, {name: self.streams[name].group_size for name in names})
        whole = {f"eval/{name}": value for name, value in result.model_dump().items()}
        file, rows = self.run.eval_file(step), [r.row(step=step, kind="eval") for r in rollouts]
        write_rows(file, self.transcripts.write(file.stem, rows))
        self.run.metrics.write({"step": step, **whole, **numbers, "time/eval": time.monotonic() - started})
        self.evaluated[step] = set(names)
        self.run.metrics.publish()
        failed = len(rollouts) - result.n
        note = f", {failed} of {len(rollouts)} trials failed" if failed else ""
        self.display.line(
            f"{evaluation_name(self.run.path)} tasks after step {step}: mean reward {result}{note} "
            f"in {time.monotonic() - started:.0f} s"
        )

    async def _run_plan(self, plan: EvalPlan, bar: Bar) -> Rollout:
        rollout = await self.client.run_rollout(self.streams[plan.source], plan.index, seed=plan.seed)
        self.transcripts.add(rollout.transcript, rollout.pending_row(kind="eval"))
        rollout.samples, rollout.sampled_turns, rollout.transcript = [], (), b""  # large, and only training needs them
        bar.advance()
        self._check_start(rollout)
        return rollout

    def _check_start(self, rollout: Rollout) -> None:
        """Stop the run if no sandbox has started in a batch's worth of trials."""
        self.any_trial_started |= sandbox_started(rollout)
        if not self.any_trial_started:
            self.unstarted.append(rollout)
            refuse_unstarted(self.unstarted, self.batch_size)


def plan_evaluation(streams: Iterable[TaskStream], *, seed: int) -> list[EvalPlan]:
    """Return all rollouts of one evaluation: `group_size` of each task."""
    return [
        EvalPlan(stream.name, index, request_seed(seed, stream.name, stream.key_of(index), number))
        for stream in streams
        for index in range(len(stream.tasks))
        for number in range(stream.group_size)
    ]


def sources_at(step: int, intervals: Mapping[str, int]) -> list[str]:
    """Return the sources whose interval divides `step`.

    Example:
        >>> sources_at(10, {"held-out": 5})
        ['held-out']
    """
    return [name for name, interval in intervals.items() if step % interval == 0]


def rewards_by_task(rollouts: Iterable[Rollout]) -> dict[str, list[float]]:
    """Return the rewards of graded rollouts, by source and task."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        own = rewards.setdefault(f"{rollout.source}/{rollout.task_key}", [])
        own += [rollout.reward] if rollout.reward is not None else []
    return rewards


def eval_result(rollouts: Iterable[Rollout]) -> EvalResult:
    """Return the mean reward of graded rollouts; every task has the same weight."""
    return EvalResult.of(mean_reward(rewards_by_task(rollouts)))


def eval_metrics(rollouts: Sequence[Rollout], group_sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of one evaluation by source, with Prime-RL's names (`eval/<source>/.../avg@k`)."""
    metrics: dict[str, float] = {}
    for source, group_size in group_sizes.items():
        own = [rollout for rollout in rollouts if rollout.source == source]
        result = eval_result(own)
        prefix = f"eval/{source}/all/agent"
        metrics |= outcome_metrics(f"eval/{source}/all", own)
        passes = {found.name: found.estimate.mean for found in repeated_passes(rewards_by_task(own))}
        metrics |= {f"{prefix}/{name}": mean for name, mean in passes.items() if mean is not None}
        if result.mean_reward is not None:
            metrics[f"{prefix}/avg@{group_size}"] = result.mean_reward
        if len(group_sizes) > 1:
            # With one source these are `eval/n`, `eval/stderr`, ...
            spread = result.model_dump(exclude={"mean_reward"}, exclude_none=True)
            metrics |= {f"{prefix}/{name}": float(value) for name, value in spread.items()}
    return metrics


def no_graded_trial_error(rollouts: Sequence[Rollout]) -> RunStoppedError:
    """Return the error of an evaluation without a reward."""
    error = next((rollout.error for rollout in rollouts if rollout.error), "no message")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(Counter(r.outcome for r in rollouts).items()))
    return RunStoppedError(
        f"none of the {len(rollouts)} evaluation trials was graded ({counts}): {error}",
        do="fix this error and continue with --resume",
    )
