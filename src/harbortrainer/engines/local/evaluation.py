"""Evaluation on held-out sources: which rollouts, with which seeds, and what came of them.

Invariants: the rollouts of an evaluation and the seeds of their requests follow from the run's seed, the source, the
task and the rollout's number, and from nothing else, so that the same policy evaluated twice is sampled the same way
twice. An evaluation measures one policy version (nothing is handed over while it runs), and one that stands in
`metrics.jsonl` is not made again by a resume.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.playing import Player, TaskStream, request_seed
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.step_metrics import outcome_metrics
from harbortrainer.errors import RunStoppedError
from harbortrainer.estimates.interval import mean_reward
from harbortrainer.estimates.repeated import repeated_passes
from harbortrainer.runs.display import Bar, Display
from harbortrainer.runs.durable import write_lines
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.summary import EvalResult, evaluations
from harbortrainer.runs.transcript_files import TranscriptBook


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """One rollout of an evaluation."""

    source: str
    index: int
    seed: int


class Evaluator:
    """The evaluations of one run.

    Args:
        streams: The evaluation sources by name; empty means that nothing is ever evaluated.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        streams: Mapping[str, TaskStream],
        player: Player,
        book: TranscriptBook,
        display: Display,
    ) -> None:
        self.run, self.streams, self.player, self.display, self.seed = run, streams, player, display, config.seed
        self.book = book
        held_out = config.orchestrator.eval
        self.intervals = {source.resolved_name: source.interval for source in (held_out.source if held_out else [])}
        self.skip_first = held_out is not None and held_out.skip_first_step

    def wanted(self, step: int, *, last: bool) -> list[str]:
        """The sources to evaluate after this step: all before the first and after the last, else those that are due."""
        if step in evaluations(self.run) or (step == 0 and self.skip_first and not last):
            return []
        return list(self.streams) if last or step == 0 else due(step, self.intervals)

    async def evaluate(self, step: int, names: Sequence[str]) -> None:
        """Evaluate the policy of version `step` on these sources and write the result down.

        Raises:
            RunStoppedError: Not one of the trials could be graded.
        """
        started = time.monotonic()
        plans = plan_evaluation([self.streams[name] for name in names], seed=self.seed)
        with self.display.bar(f"evaluating after step {step}", len(plans)) as bar:
            rollouts = await asyncio.gather(*[self._play(plan, bar) for plan in plans])
        result = result_of(rollouts)
        if not result.n:
            raise none_graded(rollouts)
        numbers = eval_metrics(rollouts, {name: self.streams[name].group_size for name in names})
        whole = {f"eval/{name}": value for name, value in result.model_dump().items()}
        file, rows = self.run.eval_file(step), [r.row(step=step, kind="eval") for r in rollouts]
        write_lines(file, self.book.write(file.stem, rows))
        self.run.metrics.write({"step": step, **whole, **numbers, "time/eval": time.monotonic() - started})
        self.run.metrics.publish()
        failed = len(rollouts) - result.n
        note = f", {failed} of {len(rollouts)} trials failed" if failed else ""
        self.display.line(f"held-out tasks after step {step}: mean reward {result}{note}")

    async def _play(self, plan: EvalPlan, bar: Bar) -> Rollout:
        rollout = await self.player.play(self.streams[plan.source], plan.index, seed=plan.seed)
        self.book.add(rollout.trial, rollout.transcript, rollout.pending_row(kind="eval"))
        bar.advance()
        return rollout


def plan_evaluation(streams: Iterable[TaskStream], *, seed: int) -> list[EvalPlan]:
    """Every rollout of one evaluation: `group_size` of each task."""
    return [
        EvalPlan(stream.name, index, request_seed(seed, stream.name, stream.key_of(index), number))
        for stream in streams
        for index in range(len(stream.tasks))
        for number in range(stream.group_size)
    ]


def due(step: int, intervals: Mapping[str, int]) -> list[str]:
    """The sources that are evaluated after step `step`.

    Example:
        >>> due(10, {"held-out": 5})
        ['held-out']
    """
    return [name for name, interval in intervals.items() if step % interval == 0]


def rewards_by_task(rollouts: Iterable[Rollout]) -> dict[str, list[float]]:
    """The graded rollouts' rewards, by source and task."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        own = rewards.setdefault(f"{rollout.source}/{rollout.task_key}", [])
        own += [rollout.reward] if rollout.reward is not None else []
    return rewards


def result_of(rollouts: Iterable[Rollout]) -> EvalResult:
    """Mean reward over the rollouts that have one, each task counting the same."""
    return EvalResult.of(mean_reward(rewards_by_task(rollouts)))


def eval_metrics(rollouts: Sequence[Rollout], group_sizes: Mapping[str, int]) -> dict[str, float]:
    """Metrics of one evaluation, by source, in Prime-RL's names where it has one (`eval/<source>/.../avg@k`)."""
    metrics: dict[str, float] = {}
    for source, group_size in group_sizes.items():
        own = [rollout for rollout in rollouts if rollout.source == source]
        result = result_of(own)
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


def none_graded(rollouts: Sequence[Rollout]) -> RunStoppedError:
    """The message for an evaluation without a single reward."""
    error = next((rollout.error for rollout in rollouts if rollout.error), "no message")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(Counter(r.outcome for r in rollouts).items()))
    return RunStoppedError(
        f"not one of {len(rollouts)} evaluation trials could be graded ({counts}): {error}",
        do="mend what is named here and go on with --resume",
    )
