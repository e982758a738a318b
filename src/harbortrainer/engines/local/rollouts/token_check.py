"""The token check: a task's trials are in its own group, and each answer trains once, whole and after its own prompt.

When an episode is received, a `SampledTurn` is made for each answer, from the sampler's completion log. Before a batch
trains, its samples are compared with them, independently of the code that builds samples.

Invariant: no step trains a trial of another group's task, a sample of another trial, or a sample twice. Every token
that trains was sampled, and the first and last token of each answer train.
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harbortrainer.engines.local.learner.training_sample import Sample
from harbortrainer.engines.local.sampler.completion_log import Completion, equal_logprobs
from harbortrainer.errors import ProofError

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace

    from harbortrainer.engines.local.rollouts.group import Group
    from harbortrainer.engines.local.rollouts.schedule import Plan


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One answer as the sampler logged it, and the tokens before it in its branch."""

    start: int
    """Number of tokens before it."""
    context: bytes
    """Digest of the tokens before it."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


def sampled_turns(trace: "WireTrace", completions: Mapping[int, Completion]) -> tuple[SampledTurn, ...]:
    """Return the answers of a trace.

    Args:
        trace: The trace.
        completions: The sampler's completion of each sampled node, by its index in `trace.nodes`.
    """
    turns = []
    for index, completion in completions.items():
        path, at = [], index
        while at is not None:
            path.append(trace.nodes[at].token_ids)
            at = trace.nodes[at].parent
        tokens = [token for node in reversed(path) for token in node]
        context = _digest(tokens[: completion.prompt_len])
        turns.append(
            SampledTurn(completion.prompt_len, context, completion.token_ids, completion.logprobs, completion.version)
        )
    return tuple(turns)


class TokenCheck:
    """The token check of a run.

    Args:
        key_of: Returns the content hash of a plan's task.
        seq_len: Maximum tokens of a sample; longer ones are truncated.
    """

    def __init__(self, key_of: "Callable[[Plan], str]", *, seq_len: int) -> None:
        self._key_of, self._seq_len = key_of, seq_len
        self._trained: set[int] = set()
        """Hashes of the trials of earlier steps of this start."""

    def check(self, groups: "Sequence[Group]", samples: Sequence[Sample]) -> None:
        """Compare a batch with what its tasks' trials sampled.

        Args:
            groups: The groups of the batch.
            samples: The samples for the learner.

        Raises:
            ProofError: They differ; the message names task and trial.
        """
        self._check_tasks(groups)
        turns = {rollout.trial: list(rollout.sampled_turns) for group in groups for rollout in group.trainable}
        trials = {trial: hash((trial, tuple(own))) for trial, own in turns.items()}
        for sample in samples:
            if trials.get(sample.trial_name) in self._trained:
                raise ProofError(f"{sample.where}: this trial was trained in an earlier step")
            _SampleCheck(sample, turns.get(sample.trial_name, []), self._seq_len).run()
        for sample in samples:
            left = [turn for turn in turns[sample.trial_name] if turn.start < self._seq_len]
            if left and sample.advantage != 0.0:  # else some of its samples were pruned
                raise ProofError(f"{sample.where}: {len(left)} of its answers are not in the batch")
        self._trained |= {trials[sample.trial_name] for sample in samples}

    def _check_tasks(self, groups: "Sequence[Group]") -> None:
        for group in groups:
            expected = (group.plan.source, self._key_of(group.plan))
            for rollout in group.rollouts:
                if (rollout.source, rollout.task_key) != expected:
                    raise ProofError(
                        f"task {rollout.task or '?'}, trial {rollout.trial or '?'}: this trial is of task key "
                        f"{rollout.task_key[:12]} in source {rollout.source}, but its group is of task key "
                        f"{expected[1][:12]} in source {expected[0]}"
                    )


class _SampleCheck:
    """The check of one sample; each answer that it trains is removed from `turns`."""

    def __init__(self, sample: Sample, turns: list[SampledTurn], seq_len: int) -> None:
        self._sample, self._turns = sample, turns
        self._is_cut = len(sample) == seq_len

    def run(self) -> None:
        """Raise `ProofError` for the first trained token that does not belong to a whole answer of the trial."""
        mask = list(map(bool, self._sample.mask))
        start = 0
        while (start := _index(mask, start)) is not None:
            turn = self._turn_at(start)
            self._turns.remove(turn)
            stop = start + len(turn.token_ids)
            if stop > len(mask) and not self._is_cut:
                raise self._error(
                    f"its answer at token {start} lacks its last {stop - len(mask)} of {stop - start} tokens"
                )
            if not all(mask[start:stop]):
                missing = mask[start:stop].index(False) + 1
                raise self._error(f"token {missing} of {stop - start} of its answer at token {start} is not trained")
            start = stop

    def _turn_at(self, start: int) -> SampledTurn:
        here = [turn for turn in self._turns if turn.start == start]
        if not here:
            raise self._error(f"its token {start} is trained, but no untrained answer of this trial starts there")
        context = _digest(self._sample.token_ids[:start])
        found = [turn for turn in here if turn.context == context and self._is_trained(turn)]
        if not found:
            raise self._error(f"its tokens at {start}, or the tokens before it, belong to no answer of this trial")
        return found[0]

    def _is_trained(self, turn: SampledTurn) -> bool:
        """Whether the sample has the answer's tokens, log-probabilities and version, up to the sample's end."""
        sample, stop = self._sample, min(turn.start + len(turn.token_ids), len(self._sample))
        length, own = stop - turn.start, slice(turn.start, stop)
        return (
            tuple(sample.token_ids[own]) == turn.token_ids[:length]
            and set(sample.versions[own]) == {turn.version}
            and equal_logprobs(turn.logprobs[:length], sample.logprobs[own])
        )

    def _error(self, what: str) -> ProofError:
        return ProofError(f"{self._sample.where}: {what}")


def _index(mask: list[bool], start: int) -> int | None:
    try:
        return mask.index(True, start)
    except ValueError:
        return None


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", token_ids)).digest()
