"""Conversion of an episode's trace to a `Rollout` with training samples.

Each root-to-leaf branch of the trace becomes one sample. Invariants:

- A sampled node that several branches share trains in the first of them only.
- Every trained token is in the sampler's completion log, with the log-probability and the policy version that sampled
  it. Every completion of the log is a turn of the trace, or is recorded as dropped. Otherwise: `ProofError`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harbortrainer.engines.local.learner.training_sample import Sample, trained_tokens, truncate
from harbortrainer.engines.local.rollouts.observations import Observations
from harbortrainer.engines.local.rollouts.reward_check import snapshot_of
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.token_check import sampled_turns
from harbortrainer.engines.local.sampler.completion_log import Completion, match_completions
from harbortrainer.environment.episode_end import episode_outcome
from harbortrainer.environment.verifiers_compat import convert_arrays, total_tokens
from harbortrainer.errors import ProofError
from harbortrainer.runs.trace_transcript import as_list, transcript_of
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord, record_of

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.trace import WireTrace


def fill_rollout(
    rollout: Rollout,
    episode: "WireEpisode",
    completions: Sequence[Completion],
    *,
    temperature: float,
    seq_len: int,
    roles: Mapping[str, float],
) -> Rollout:
    """Fill in a rollout from its episode, which has one agent.

    Args:
        rollout: Has its source and task; is changed and returned.
        episode: As received from the environment server.
        completions: Entries of the sampler's completion log for the trace's id.
        temperature: The sampling temperature.
        seq_len: Maximum tokens of a sample; longer ones are truncated, as in Prime-RL.
        roles: Weight of each role whose messages the model learns to predict; empty without ECHO.

    Raises:
        ProofError: The trace and the completion log do not match.
    """
    trace = episode.traces[0] if episode.traces else None
    if trace is not None:
        convert_arrays(trace)
    name, record = rollout.task, record_of(trace) if trace else None
    rollout.record, (rollout.outcome, rollout.error) = record, episode_outcome(episode, record)
    if record is not None:
        rollout.task, rollout.task_key = record.task or name, record.task_key or rollout.task_key
    if trace is None:
        return rollout
    versions: dict[int, int] = {}
    rollout.trial = (record.trial_name if record else "") or trace.id
    rollout.turns, rollout.branches, rollout.truncated = trace.num_turns, trace.num_branches, trace.is_truncated
    rollout.input_tokens, rollout.total_tokens = trace.num_input_tokens, total_tokens(trace)
    rollout.output_tokens = sum(sum(node.mask) for node in trace.nodes)
    rollout.total_output_tokens = trace.num_output_tokens
    if (usage := trace.usage) is not None:
        rollout.prompt_tokens, rollout.sampled_tokens = usage.input_tokens, usage.completion_tokens
    rollout.metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    if trace.ok and episode.ok and rollout.outcome.trains:
        rollout.reward_snapshot = snapshot_of(trace)
        where = f"task {rollout.task}, trial {rollout.trial}"
        matched = node_completions(trace, completions, where=where)
        rollout.sampled_turns = sampled_turns(trace, matched)
        versions = {index: completion.version for index, completion in matched.items()}
        check_unused_completions(trace, record, len(completions) - len(versions), where=where)
        rollout.reward, rollout.version = float(trace.reward), min(versions.values(), default=None)
        whole = trace_samples(trace, versions, temperature, roles, task=name, trial=rollout.trial, seq_len=seq_len)
        rollout.samples = [sample for sample in (truncate(it, seq_len) for it in whole) if any(sample.mask)]
        rollout.truncated_samples = sum(len(sample) > seq_len for sample in whole)
        rollout.truncated_tokens = trained_tokens(whole) - trained_tokens(rollout.samples)
    rollout.transcript = transcript_of(trace, versions=versions, seq_len=seq_len).packed()
    return rollout


def node_completions(trace: "WireTrace", completions: Sequence[Completion], *, where: str) -> dict[int, Completion]:
    """Return the completion of every sampled node, by its index in `trace.nodes`.

    Raises:
        ProofError: A sampled node is not in the completion log, or has a prompt of another length there.
    """
    sampled = {index: node for index, node in enumerate(trace.nodes) if node.sampled and any(node.mask)}
    turns = [
        ([token for token, own in zip(node.token_ids, node.mask, strict=True) if own], node.logprobs)
        for node in sampled.values()
    ]
    matched = dict(zip(sampled, match_completions(turns, completions, where=where), strict=True))
    for index, completion in matched.items():
        prompt = prompt_len(trace, index)
        if prompt != completion.prompt_len:
            raise ProofError(
                f"{where}: a turn follows {prompt} tokens in the trace, but the engine sampled it after "
                f"{completion.prompt_len}"
            )
    return matched


def check_unused_completions(trace: "WireTrace", record: TrialRecord | None, unused: int, *, where: str) -> None:
    """Check that every completion without a turn is recorded as dropped.

    A call that failed, was refused at a limit, or whose completion came too late stays in `trace.calls` without a node.
    Each agent phase that timed out may have cut off one more call, which is not recorded.

    Args:
        trace: The trace.
        record: The trial's record.
        unused: Completions in the log that are no turn of the trace.
        where: Task and trial, for the message.

    Raises:
        ProofError: There are more: a turn is missing.
    """
    outcomes = [step.outcome for step in record.steps] or [record.outcome] if record else []
    dropped = sum(call.node is None for call in trace.calls) + outcomes.count(Outcome.agent_timeout)
    if unused > dropped:
        raise ProofError(
            f"{where}: {unused} completions of the engine are not turns of this trial's trace, which records only "
            f"{dropped} as dropped. A turn is missing"
        )


def prompt_len(trace: "WireTrace", index: int) -> int:
    """Return the number of tokens from the root to a node's first sampled one."""
    length, parent = trace.nodes[index].mask.index(True), trace.nodes[index].parent
    while parent is not None:
        length += len(trace.nodes[parent].token_ids)
        parent = trace.nodes[parent].parent
    return length


def trace_samples(
    trace: "WireTrace",
    versions: Mapping[int, int],
    temperature: float,
    roles: Mapping[str, float],
    *,
    task: str,
    trial: str,
    seq_len: int | None = None,
) -> list[Sample]:
    """Return one sample per branch that has trainable tokens of its own, at full length and with advantage 0.

    A branch without trainable tokens among its first `seq_len` will not train, so it predicts no messages.
    """
    observations = Observations(trace, roles)
    index_of = {id(node): index for index, node in enumerate(trace.nodes)}
    trained: set[int] = set()
    samples = []
    for branch in trace.branches:
        path = [(index_of[id(node)], node.mask) for node in branch.nodes]
        mask = [sampled and index not in trained for index, own in path for sampled in own]
        trained.update(index for index, _ in path)
        if any(mask):
            sample = Sample(
                token_ids=as_list(branch.token_ids),
                mask=mask,
                logprobs=as_list(branch.logprobs),
                versions=[versions.get(index, 0) for index, own in path for _ in own],
                temperature=temperature,
                advantage=0.0,
                ce_weights=observations.weights([index for index, _ in path]) if any(mask[:seq_len]) else None,
                task_key=task,
                trial_name=trial,
            )
            samples.append(sample)
    return samples
