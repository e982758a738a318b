"""The reward check: each trial must train with its own reward and advantage.

When an episode is received, a `RewardSnapshot` copies the reward from its record before any other code uses it. Before
a batch trains, every reward is compared with its snapshot, and with Harbor's result on disk if it is kept. Every
advantage is recomputed from the snapshots by other code, in exact arithmetic.

Invariant: a reward that was permuted, flipped or rescaled, or an advantage of another trial, stops the run before any
token trains with it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.advantage import LEAST_MEAN
from harbortrainer.environment.verifiers_compat import total_tokens
from harbortrainer.errors import ProofError
from harbortrainer.trials.outcome import scalar_reward
from harbortrainer.trials.record import INFO_KEY, only_finite

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace

    from harbortrainer.config.algorithm_config import Algo
    from harbortrainer.engines.local.rollouts.group import Group
    from harbortrainer.engines.local.rollouts.rollout import Rollout

TOLERANCE = 1e-9
"""Maximum difference of two computed advantages, over the group's largest reward or advantage (at least 1)."""
RESULT_FILE = "result.json"
MAY_BE_ZERO = ("self_inflicted", "agent_timeout")
"""Outcomes whose reward may be 0 whatever the verifier gave (a timeout with `agent_timeout = "zero"`).

The same holds for trials with changed tools (`on_tampering = "zero"`)."""


@dataclass(frozen=True, slots=True)
class RewardSnapshot:
    """Reward and lengths of a trial, as received from the environment server."""

    trial: str
    outcome: str
    reward: float
    rewards: Mapping[str, float] | None
    """The verifier's dictionary, where the trial has a record."""
    reward_key: str | None
    """The name of the reward among them; None for the default."""
    trial_dir: str | None
    """Harbor's folder of the trial, which may have been deleted."""
    lengths: tuple[int, int, int]
    """Sampled tokens of its final sequences, their other tokens, and turns, for the length penalty."""
    sampled_tokens: int = 0
    """Sampled tokens, each counted once, for the length-weighted baseline."""
    tampered: bool = False
    """Whether the agent changed tools that the verifier uses."""

    @property
    def may_be_zero(self) -> bool:
        """Whether its reward may be 0 although the verifier gave another one."""
        return self.tampered or self.outcome in MAY_BE_ZERO


def snapshot_of(trace: "WireTrace") -> RewardSnapshot:
    """Return the snapshot of a trace that trains; without a record it uses the trace's own reward."""
    record = trace.info.get(INFO_KEY)
    record = record if isinstance(record, dict) else {}
    sampled = trace.num_output_tokens
    reward = record.get("reward", trace.reward)
    rewards = record.get("rewards")
    return RewardSnapshot(
        trial=str(record.get("trial_name") or trace.id),
        outcome=str(record.get("outcome", "")),
        reward=float("nan") if reward is None else float(reward),
        rewards=None if rewards is None else dict(rewards),
        reward_key=record.get("reward_key"),
        trial_dir=record.get("trial_dir"),
        lengths=(sampled, total_tokens(trace) - sampled, trace.num_turns),
        sampled_tokens=sum(sum(node.mask) for node in trace.nodes),
        tampered=bool(record.get("changed_tools")),
    )


def check_rewards(groups: "Sequence[Group]", samples: Sequence[Sample]) -> None:
    """Compare the rewards and advantages of a batch with the snapshots.

    Args:
        groups: The groups of the batch.
        samples: The samples for the learner.

    Raises:
        ProofError: They differ; the message names task, trial and both values.
    """
    expected: dict[str, Fraction] = {}
    tolerances: dict[str, float] = {}
    required: Counter[str] = Counter()
    for group in groups:
        snapshots = [_checked_snapshot(rollout) for rollout in group.trainable]
        largest = max([1.0, *(abs(snapshot.reward) for snapshot in snapshots)])
        for rollout, advantage in zip(group.trainable, _advantages(snapshots, group.algo), strict=True):
            if rollout.trial in expected:
                raise ProofError(f"{_where(rollout)}: this trial is in the batch twice")
            expected[rollout.trial] = advantage
            tolerances[rollout.trial] = TOLERANCE * max(largest, abs(advantage))
            predicted = sum(sample.ce_weights is not None for sample in rollout.samples)
            required[rollout.trial] = len(rollout.samples) if abs(advantage) > TOLERANCE * largest else predicted
    for sample in samples:
        advantage = expected.get(sample.trial_name)
        if advantage is None:
            raise ProofError(f"{sample.where}: this trial is in none of the batch's groups, but has a sample")
        if not abs(sample.advantage - advantage) <= tolerances[sample.trial_name]:
            raise ProofError(
                f"{sample.where}: its advantage is {sample.advantage:g}, but the rewards of its group give "
                f"{float(advantage):g}"
            )
    present = Counter(sample.trial_name for sample in samples)
    for trial, count in required.items():
        if count > present[trial]:
            raise ProofError(f"trial {trial}: {present[trial]} of its {count} samples are in the batch")


def _checked_snapshot(rollout: "Rollout") -> RewardSnapshot:
    """Return the snapshot of a rollout after comparing its reward with all records of it."""
    snapshot = rollout.reward_snapshot
    if snapshot is None:
        raise ProofError(f"{_where(rollout)}: its reward is {rollout.reward}, but it has no record")
    if rollout.trial != snapshot.trial:
        raise ProofError(f"{_where(rollout)}: it has the record of trial {snapshot.trial}")
    if rollout.reward != snapshot.reward:
        raise ProofError(f"{_where(rollout)}: its reward is {rollout.reward}, but its record says {snapshot.reward}")
    verifier_reward = scalar_reward(snapshot.rewards, key=snapshot.reward_key)
    zeroed = snapshot.reward == 0.0 and snapshot.may_be_zero
    if verifier_reward not in (None, snapshot.reward) and not zeroed:
        raise ProofError(f"{_where(rollout)}: its reward is {rollout.reward}, but its verifier gave {verifier_reward}")
    kept = _harbor_rewards(snapshot)
    if kept is not None and kept != snapshot.rewards:
        raise ProofError(f"{_where(rollout)}: its rewards are {snapshot.rewards}, but Harbor's result says {kept}")
    return snapshot


def _harbor_rewards(snapshot: RewardSnapshot) -> dict[str, float] | None:
    """Return the rewards in Harbor's result on disk; None if there are none."""
    if snapshot.rewards is None or snapshot.trial_dir is None:
        return None
    try:
        result = json.loads((Path(snapshot.trial_dir) / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return only_finite((result.get("verifier_result") or {}).get("rewards"))


def _where(rollout: "Rollout") -> str:
    return f"task {rollout.task or '?'}, trial {rollout.trial or '?'}"


def _advantages(snapshots: Sequence[RewardSnapshot], algo: "Algo") -> list[Fraction]:
    """Return the advantages [n] in exact arithmetic; `advantage.py` has the formula."""
    if len(snapshots) < 2:
        return [Fraction(0)] * len(snapshots)
    rewards = [Fraction(snapshot.reward) for snapshot in snapshots]
    scores, penalty = rewards, algo.length_penalty
    if penalty is not None:
        mean = sum(rewards, Fraction(0)) / len(rewards)
        weights = [penalty.num_output_tokens_weight, penalty.num_input_tokens_weight, penalty.num_turns_weight]
        longest = [max(1, *column) for column in zip(*(snapshot.lengths for snapshot in snapshots), strict=True)]
        scores = [
            reward
            - mean * sum(Fraction(w) * own / most for w, own, most in zip(weights, it.lengths, longest, strict=True))
            for reward, it in zip(rewards, snapshots, strict=True)
        ]
    counts = [snapshot.sampled_tokens if algo.length_weighted_baseline else 1 for snapshot in snapshots]
    mean = sum((count * score for count, score in zip(counts, scores, strict=True)), Fraction(0)) / sum(counts)
    if algo.type == "max_rl":
        least = LEAST_MEAN * max(1, *map(abs, scores))
        return [(score - mean) / mean if mean > least else Fraction(0) for score in scores]
    return [score - mean for score in scores]
