"""How long a trial and a step may take: turns, tokens, and what a card of that kind samples.

The rule: decoding reads the weights and the caches of all trials on the card once a token, so a card gives each trial
`SHARE * bandwidth / (weights + trials * context * cache)` tokens a second. An estimate, good to a factor of two; it was
not measured here. Contract: no estimate where the card, or the size of the model, is not known.
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
"""Bytes of memory that a card reads a second, by a part of its name; from the makers' data sheets."""

ASSUMED = "H100"
SHARE = 0.6
"""Of the bandwidth, what decoding gets out of it."""

CACHE_BYTES = 1.8e-5
"""Bytes of cache a token of context, for each parameter: 147 456 for Qwen3-8B, and alike for models of that shape."""

TURN_S = 5.0
"""Seconds of a turn in which nothing is sampled: the commands, and the prompt."""

TYPICAL = 0.5
"""Of the most that a trial may sample, what one samples as a mean."""


@dataclass(frozen=True)
class Pace:
    """One trial's work, and the speed at which it is sampled."""

    turns: int
    tokens: int
    """Most tokens that it may sample over all turns."""
    tokens_a_second: float
    card: str
    """What samples it."""

    def trial_seconds(self, share: float = 1.0) -> float:
        """Seconds of a trial that samples this share of what it may."""
        return share * (self.tokens / self.tokens_a_second + self.turns * TURN_S)


def check(plan: LaunchPlan) -> Iterator[Finding]:
    """The estimate of a step's wall time, and whether the agents' time holds a trial."""
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
            f"a step of {run.orchestrator.batch_size} trials, {inflight} at once: about {minutes:.0f} minutes on "
            f"{pace.card} ({pace.tokens_a_second:.0f} tokens a second each, half of at most {pace.tokens} a trial)"
        )
        yield green("pace", what)
        yield from time_holds(plan, source, pace, harness.timeout_multiplier)


def time_holds(plan: LaunchPlan, source: str, pace: Pace, multiplier: float) -> Iterator[Finding]:
    """Whether the shortest time that a task gives its agent holds the longest trial."""
    limits = agent_seconds(plan.played[f"{source}.env.taskset"])
    if not limits:
        return
    shortest, needed = min(limits) * multiplier, pace.trial_seconds()
    if needed > shortest:
        what = (
            f"{pace.tokens} tokens in {pace.turns} turns take about {needed:.0f} s, a task's agent has {shortest:.0f} s"
        )
        raised = math.ceil(10 * multiplier * needed / shortest) / 10
        do = f"raise timeout_multiplier to {raised}, or lower max_completion_tokens or max_turns"
        yield yellow("timeouts", what, do, plan.where(f"{source}.env.agent.harness.timeout_multiplier"))


def pace_of(run: PrimeRun, cards: Sequence[Gpu], inflight: int, turns: int) -> Pace | None:
    """The pace of one trial among those in flight, or nothing when card or model is not known.

    Where no card is at all, the file is meant for another machine, and the estimate is for `ASSUMED`.
    """
    size, names = parameters(run.model.name), [card.name for card in cards] or [ASSUMED]
    known = [(speed, name) for name in names for part, speed in BANDWIDTH.items() if part in name]
    if size is None or not known or run.inference is None:
        return None
    bandwidth, card = min(known)
    most = run.inference.vllm.max_model_len or run.seq_len
    tokens = min(turns * (run.orchestrator.train.sampling.max_completion_tokens or most), most)
    sharing = inflight / max(1, run.deployment.num_infer_gpus)
    context = tokens * TYPICAL / 2  # it grows from nothing over a trial's life
    read = 2 * size + sharing * context * size * CACHE_BYTES
    return Pace(turns, tokens, SHARE * bandwidth / read, card)


def turns_of(plan: LaunchPlan, source: str) -> int:
    """Most turns of a trial; a trial without a bound is taken for one of fifty."""
    assert plan.run is not None
    kind, _, index = source.removeprefix("orchestrator.").partition(".source[")
    table = plan.run.orchestrator.train if kind == "train" else plan.run.orchestrator.eval
    assert table is not None
    agent = table.source[int(index.rstrip("]"))].env.get("agent")
    own = plan.harnesses[f"{source}.env.agent.harness"].max_turns
    said = agent.get("max_turns") if isinstance(agent, dict) else None
    bounds = [int(bound) for bound in (own, said) if isinstance(bound, int | str) and str(bound).isdecimal()]
    return min(bounds, default=50)
