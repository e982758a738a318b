"""Runs evaluations, and remembers which were made.

Invariant: an evaluation measures one policy version (nothing is handed over while it runs), and one that stands in
`metrics.jsonl` is not made again by a resume.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.local.evaluation import EvalPlan, due, eval_metrics, plan_evaluation, result_of
from harbortrainer.engines.local.player import Player
from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.engines.local.source import Source
from harbortrainer.engines.local.stop import RunStoppedError
from harbortrainer.runs.display import Display
from harbortrainer.runs.durable import append_line, read_lines, write_lines
from harbortrainer.runs.folder import RunFolder


class Evaluator:
    """The evaluations of one run.

    Args:
        sources: The evaluation sources by name; empty means that nothing is ever evaluated.
    """

    def __init__(
        self, config: RunConfig, run: RunFolder, sources: dict[str, Source], player: Player, display: Display
    ) -> None:
        self.config, self.run, self.sources, self.player, self.display = config, run, sources, player, display
        held_out = config.orchestrator.eval
        self.intervals = {source.resolved_name: source.interval for source in (held_out.source if held_out else [])}
        self.skip_first = held_out is not None and held_out.skip_first_step

    def wanted(self, step: int, *, last: bool) -> list[str]:
        """The sources to evaluate after this step: all before the first and after the last, else those that are due."""
        if any(row["step"] == step for row in evaluations(self.run)):
            return []
        if last:
            return list(self.sources)
        if step == 0:
            return [] if self.skip_first else list(self.sources)
        return due(step, self.intervals)

    async def evaluate(self, step: int, names: Sequence[str]) -> None:
        """Evaluate the policy of version `step` on these sources and write the result down.

        Raises:
            RunStoppedError: Not one of the trials could be graded.
        """
        started = time.monotonic()
        plans = plan_evaluation([self.sources[name] for name in names], seed=self.config.seed)
        with self.display.bar(f"evaluating after step {step}", len(plans)) as bar:
            rollouts = await self._play(plans, bar)
        result = result_of(rollouts)
        if not result.n:
            raise none_graded(rollouts)
        numbers = eval_metrics(rollouts, {name: self.sources[name].group_size for name in names})
        whole = {f"eval/{name}": value for name, value in result.model_dump().items()}
        write_lines(self.run.eval_file(step), [r.row(step=step, kind="eval") for r in rollouts])
        append_line(self.run.metrics_file, {"step": step, **whole, **numbers, "time/eval": time.monotonic() - started})
        failed = len(rollouts) - result.n
        note = f", {failed} of {len(rollouts)} trials failed" if failed else ""
        self.display.line(
            f"held-out tasks after step {step}: mean reward {result.mean_reward:.3f} over {result.n} trials{note}"
        )

    async def _play(self, plans: Sequence[EvalPlan], bar: Any) -> list[Rollout]:
        async def one(plan: EvalPlan) -> Rollout:
            rollout = await self.player.play(self.sources[plan.source], plan.index, seed=plan.seed)
            bar.advance()
            return rollout

        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(one(plan)) for plan in plans]
        return [task.result() for task in tasks]


def evaluations(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of the evaluations that were made."""
    return [row for row in read_lines(run.metrics_file) if "eval/n" in row]


def none_graded(rollouts: Sequence[Rollout]) -> RunStoppedError:
    """The message for an evaluation without a single reward."""
    names = [rollout.outcome for rollout in rollouts]
    error = next((rollout.error for rollout in rollouts if rollout.error), "no message")
    counts = ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names)))
    return RunStoppedError(
        f"not one of {len(rollouts)} evaluation trials could be graded ({counts}): {error}",
        do="mend what is named here and go on with --resume",
    )
