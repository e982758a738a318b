"""Estimate of the wall time of a trial and a training step on a GPU; for the embedded engine see `sampling_speed`.

Decoding a token reads the weights and the KV caches of all trials on the GPU once. So each trial gets
`SHARE * bandwidth / (weights + trials * context * cache)` tokens per second. The estimate is meant to be right within a
factor of two; it was not measured. There is none if the GPU or the model's size is unknown.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harbortrainer.config.prime_rl_run import PrimeRun
from harbortrainer.doctor.finding import Finding, green, yellow
from harbortrainer.doctor.gpus import parameters
from harbortrainer.doctor.launch_plan import LaunchPlan
from harbortrainer.engines.engine_choice import Gpu
from harbortrainer.tasks.task_limits import agent_seconds

BANDWIDTH = {"B200": 8.0e12, "H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "L40S": 0.86e12, "4090": 1.0e12}
"""Memory bandwidth of a GPU in bytes per second, by a part of its name; from the vendors' data sheets."""

ASSUMED = "H100"
SHARE = 0.6
"""Share of the bandwidth that decoding reaches."""

CACHE_BYTES = 1.8e-5
"""Bytes of KV cache per token of context and parameter: 147 456 per token for Qwen3-8B, similar for similar models."""

TURN_S = 5.0
"""Seconds per turn without sampling: running the commands and building the prompt."""

TYPICAL = 0.5
"""Mean share of its token limit that a trial samples."""


@dataclass(frozen=True)
class Pace:
    """Turns and tokens of one trial, and the sampling speed."""

    turns: int
    tokens: int
    """Max tokens over all turns."""
    tokens_a_second: float
    card: str
    """Name of what samples."""
    turn_s: float = TURN_S
    """Seconds per turn without sampling."""

    def trial_seconds(self, share: float = 1.0) -> float:
        """Seconds of a trial that samples this share of its token limit."""
        return share * (self.tokens / self.tokens_a_second + self.turns * self.turn_s)


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """Estimate the wall time of a training step, and compare a trial's time with the agents' timeouts."""
    run = plan.run
    if not isinstance(run, PrimeRun) or run.inference is None or not run.orchestrator.batch_size:
        return
    inflight = plan.parallel or run.orchestrator.batch_size
    for key, harness in plan.harnesses.items():
        if not key.startswith("orchestrator.train."):
            continue
        source = key.removesuffix(".env.agent.harness")
        pace = pace_of(run, plan.gpus, inflight, turns_of(plan, source))
        if pace is None:
            return
        waves = max(1.0, run.orchestrator.batch_size / inflight)
        minutes = waves * pace.trial_seconds(TYPICAL) / 60
        what = (
            f"a step of {run.orchestrator.batch_size} trials, {inflight} in parallel: about {minutes:.0f} minutes on "
            f"{pace.card} ({pace.tokens_a_second:.0f} tokens/s per trial, half of max {pace.tokens} tokens sampled)"
        )
        yield green("pace", what)
        yield from check_timeouts(plan, source, pace, harness.timeout_multiplier)


def check_timeouts(plan: LaunchPlan, source: str, pace: Pace, multiplier: float) -> Iterator[Finding]:
    """Check whether the longest trial fits in the shortest agent timeout of the tasks."""
    limits = agent_seconds(plan.tasks[f"{source}.env.taskset"])
    if not limits:
        return
    shortest, needed = min(limits) * multiplier, pace.trial_seconds()
    if needed > shortest:
        what = (
            f"{pace.tokens} tokens in {pace.turns} turns take about {needed:.0f} s, but a task's agent has "
            f"{shortest:.0f} s"
        )
        raised = math.ceil(10 * multiplier * needed / shortest) / 10
        do = f"raise timeout_multiplier to {raised}, or lower max_completion_tokens or max_turns"
        yield yellow("timeouts", what, do, plan.where(f"{source}.env.agent.harness.timeout_multiplier"))


def pace_of(run: PrimeRun, cards: Sequence[Gpu], inflight: int, turns: int) -> Pace | None:
    """Estimate the pace of one trial among those in flight; None if GPU or model size is unknown.

    On a machine without a GPU, the run file is assumed to be for another machine with `ASSUMED` GPUs.
    """
    size, names = parameters(run.model.name), [card.name for card in cards] or [ASSUMED]
    known = [(speed, name) for name in names for part, speed in BANDWIDTH.items() if part in name]
    if size is None or not known or run.inference is None:
        return None
    bandwidth, card = min(known)
    most = run.inference.vllm.max_model_len or run.seq_len
    tokens = min(turns * (run.orchestrator.train.sampling.max_completion_tokens or most), most)
    sharing = inflight / max(1, run.deployment.num_infer_gpus)
    context = tokens * TYPICAL / 2  # the mean: it grows from 0 during a trial
    read = 2 * size + sharing * context * size * CACHE_BYTES
    return Pace(turns, tokens, SHARE * bandwidth / read, card)


def turns_of(plan: LaunchPlan, source: str) -> int:
    """Max turns of a trial of a source; 50 if there is no limit."""
    assert plan.run is not None
    kind, _, index = source.removeprefix("orchestrator.").partition(".source[")
    table = plan.run.orchestrator.train if kind == "train" else plan.run.orchestrator.eval
    assert table is not None
    agent = table.source[int(index.rstrip("]"))].env.get("agent")
    own = plan.harnesses[f"{source}.env.agent.harness"].max_turns
    agent_turns = agent.get("max_turns") if isinstance(agent, dict) else None
    bounds = [int(bound) for bound in (own, agent_turns) if isinstance(bound, int | str) and str(bound).isdecimal()]
    return min(bounds, default=50)
