"""The record of one rollout: its outcome, reward, training samples, token counts and timings.

Invariant: a rollout whose outcome does not train has no reward and no samples; a failure is never a reward of 0.
`trace_samples.py` fills the record from an episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.rollouts.reward_check import RewardSnapshot
from harbortrainer.engines.local.rollouts.token_check import SampledTurn
from harbortrainer.runs.trial_row import RowCut, RowStep, RowTokens, TrialRow
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord


class LoopFields(TypedDict, total=False):
    """Fields of a `TrialRow` that the training loop sets, not the trial."""

    step: int | None
    kind: str
    group: str | None
    advantage: float | None
    not_trained: str | None


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One trial that ended.

    Example:
        >>> Rollout(source="s", task="fix", outcome=Outcome.completed, reward=1.0, samples=[sample]).trainable
        True
    """

    source: str
    """Name of the task's source."""
    task: str = ""
    """The task's name."""
    task_key: str = ""
    """The task's content hash."""
    trial: str = ""
    """The trial's name, or the trace's id if no trial was started."""
    outcome: Outcome
    """How the trial ended."""
    reward: float | None = None
    """The scalar reward; None if the outcome does not train."""
    samples: list[Sample] = field(default_factory=list)
    """[B] one sample per branch; their advantages are not set yet."""
    version: int | None = None
    """Oldest policy version that sampled one of its tokens; None if no token was sampled."""
    turns: int = 0
    """Model calls on the trace."""
    branches: int = 0
    """Leaves of the trace."""
    input_tokens: int = 0
    """Prompt tokens, each counted once."""
    output_tokens: int = 0
    """Sampled tokens, each counted once."""
    total_tokens: int = 0
    """Length of the final sequences, summed over branches."""
    total_output_tokens: int = 0
    """Sampled tokens of the final sequences, summed over branches."""
    prompt_tokens: int = 0
    """Prompt tokens of all calls as the model's server counted them, the whole prompt at each call."""
    sampled_tokens: int = 0
    """Completion tokens of all calls, late completions included."""
    logged_tokens: int = 0
    """Sampled tokens of the trial's completions in the sampler's log."""
    truncated: bool = False
    """Whether a limit ended it."""
    truncated_samples: int = 0
    """Branches longer than `seq_len`."""
    truncated_tokens: int = 0
    """Sampled tokens beyond `seq_len`, each counted once."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment, by name."""
    record: TrialRecord | None = None
    """The trial's record, from Harbor."""
    reward_snapshot: RewardSnapshot | None = None
    """Reward and lengths as received from the environment server; None if the trial does not train."""
    sampled_turns: tuple[SampledTurn, ...] = ()
    """Its answers as the sampler logged them; empty if the trial does not train."""
    error: str | None = None
    """The error, in one line."""
    server_lost: bool = False
    """Whether its environment server ended, through no fault of its own."""
    transcript: bytes = b""
    """Packed messages and tokens; empty if no trial was started."""

    @property
    def trainable(self) -> bool:
        """Whether it has a reward and sampled tokens, so that its group's mean includes it."""
        return self.reward is not None and bool(self.samples)

    @property
    def has_predicted_tokens(self) -> bool:
        """Whether the model learns to predict some of its prompt tokens (ECHO), whatever its reward."""
        return any(sample.ce_weights is not None for sample in self.samples)

    @property
    def returned(self) -> bool:
        """Whether the trial ended by itself, with or without an error, and was not cancelled."""
        return self.outcome is not Outcome.cancelled

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of each phase of the trial."""
        return {phase: took for phase, took in self.record.timings if took is not None} if self.record else {}

    def row(self, **loop_fields: Unpack[LoopFields]) -> TrialRow:
        """Return its row for `rollouts/step_N.jsonl`."""
        record = self.record
        return TrialRow(
            **loop_fields,
            source=self.source,
            task=self.task,
            task_key=self.task_key,
            trial=self.trial,
            outcome=self.outcome,
            reward=self.reward,
            rewards=record.rewards if record else None,
            turns=self.turns,
            branches=self.branches,
            tokens=RowTokens(input=self.input_tokens, output=self.output_tokens, total=self.total_tokens),
            truncated=self.truncated,
            cut=RowCut(samples=self.truncated_samples, tokens=self.truncated_tokens),
            timings=self.timings,
            version=self.version,
            steps=[RowStep.model_validate(step.model_dump(mode="json")) for step in record.steps] if record else [],
            error=self.error,
        )

    def pending_row(self, *, kind: str, group: str | None = None) -> TrialRow:
        """Return its row before the loop decides whether to train on the trial."""
        return self.row(step=None, kind=kind, group=group, advantage=None, not_trained=None)


def outcome_shares(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the share of every outcome among at least one rollout; 0.0 if it did not occur.

    Example:
        >>> outcome_shares([Rollout(source="s", outcome=Outcome.completed)])["completed"]
        1.0
    """
    names = [rollout.outcome for rollout in rollouts]
    return {str(outcome): names.count(outcome) / len(names) for outcome in Outcome}
