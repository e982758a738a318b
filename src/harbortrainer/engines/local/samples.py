"""From verifiers' episode to a `Rollout` with samples.

One root-to-leaf branch is one sample. Invariants: a sampled node that several branches share trains in the first of
them only; every trained token is one that the sampler's ledger holds, with the log-probability and the policy version
it was sampled at (`ProofError` otherwise); a trace that is not ok yields no sample.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from harbortrainer.engines.local.learner.proof import ProofError, match_completions
from harbortrainer.engines.local.learner.sample import Sample, cut
from harbortrainer.engines.local.rollout import Rollout
from harbortrainer.trials.outcome import Outcome


class SampledCompletion(Protocol):
    """One request of the sampler's ledger."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def version(self) -> int: ...


def rollout_of(
    episode: Any,
    completions: Sequence[SampledCompletion],
    *,
    source: str,
    task: str,
    task_key: str,
    temperature: float,
    seq_len: int,
) -> Rollout:
    """What came of one episode of one agent.

    Args:
        episode: verifiers' `Episode`, as the environment server returned it.
        completions: What the sampler's ledger has for the trace's id.
        source: Name of the source.
        task: The task's name.
        task_key: The task's content hash.
        temperature: What the tokens were sampled at.
        seq_len: Most tokens of a sample; the rest is cut, as in Prime-RL.

    Raises:
        ProofError: The trace holds a sampled token that the sampler did not sample.
    """
    trace = episode.traces[0] if episode.traces else None
    if trace is None:
        return Rollout(source=source, task=task, task_key=task_key, **blame(episode))
    record = trace.info.get("harbor") or {}
    rollout = Rollout(
        source=source,
        task=record.get("task") or task,
        task_key=record.get("task_key") or task_key,
        trial=record.get("trial_name") or trace.id,
        record=record,
        **(sizes_of(trace) | blame(episode)),
    )
    if trace.ok and episode.ok and Outcome(rollout.outcome).trains:
        versions = versions_of(trace, completions, where=f"task {rollout.task}, trial {rollout.trial}")
        rollout.reward = float(trace.reward)
        rollout.samples = samples_of(
            trace, versions, temperature=temperature, seq_len=seq_len, task_key=task, trial_name=rollout.trial
        )
        if versions:
            rollout.version, rollout.newest_version = min(versions.values()), max(versions.values())
    return rollout


def blame(episode: Any) -> dict[str, Any]:
    """Outcome and error of an episode: the trial's own word for it, else what verifiers recorded."""
    trace = episode.traces[0] if episode.traces else None
    record = (trace.info.get("harbor") if trace else None) or {}
    last = (trace.last_error if trace else None) or episode.last_error
    error = " ".join(f"{last.type}: {last.message}".split())[:500] if last else None
    failed = not episode.ok or trace is None or not trace.ok
    outcome = Outcome(record["outcome"]) if "outcome" in record else None
    if outcome is None or (failed and outcome.trains):
        outcome = outcome_in(last.message if last else "") if failed else Outcome.completed
    return {"outcome": str(outcome), "error": error}


def outcome_in(message: str) -> Outcome:
    """The outcome an error's message starts with (`sandbox_error: ...`); without one the harness is to blame."""
    word = message.split(":", 1)[0].strip()
    return Outcome(word) if word in list(Outcome) and not Outcome(word).trains else Outcome.agent_error


def sizes_of(trace: Any) -> dict[str, Any]:
    """Counts, metrics and timings of a trace, as fields of `Rollout`."""
    record = trace.info.get("harbor") or {}
    timings = {name: float(value) for name, value in (record.get("timings") or {}).items() if value is not None}
    return {
        "turns": trace.num_turns,
        "branches": trace.num_branches,
        "input_tokens": trace.num_input_tokens,
        "output_tokens": sum(sum(node.mask) for node in trace.nodes),
        "total_tokens": trace.num_total_tokens,
        "truncated": trace.is_truncated,
        "metrics": {name: float(value) for name, value in trace.metrics.items() if value is not None},
        "timings": timings,
    }


def versions_of(trace: Any, completions: Sequence[SampledCompletion], *, where: str) -> dict[int, int]:
    """The policy version of every sampled node, by its index in `trace.nodes`.

    Raises:
        ProofError: A sampled node is not what the engine sampled after a prompt of that length.
    """
    nodes = [index for index, node in enumerate(trace.nodes) if node.sampled and any(node.mask)]
    turns = [(sampled_ids(trace.nodes[index]), trace.nodes[index].logprobs) for index in nodes]
    matched = match_completions(turns, completions, where=where)
    for index, completion in zip(nodes, matched, strict=True):
        prompt = prompt_len(trace, index)
        if prompt != completion.prompt_len:
            raise ProofError(
                f"{where}: a turn stands after {prompt} tokens in the trace, but the engine sampled it "
                f"after {completion.prompt_len}"
            )
    return {index: completion.version for index, completion in zip(nodes, matched, strict=True)}


def sampled_ids(node: Any) -> list[int]:
    """The tokens of a node that the model sampled."""
    return [token for token, sampled in zip(node.token_ids, node.mask, strict=True) if sampled]


def prompt_len(trace: Any, index: int) -> int:
    """Tokens before the first sampled one of a node, from the root."""
    length = trace.nodes[index].mask.index(True)
    parent = trace.nodes[index].parent
    while parent is not None:
        length += len(trace.nodes[parent].token_ids)
        parent = trace.nodes[parent].parent
    return length


def samples_of(
    trace: Any, versions: dict[int, int], *, temperature: float, seq_len: int, task_key: str, trial_name: str
) -> list[Sample]:
    """One sample a branch that has something of its own to train, advantages 0."""
    index_of = {id(node): index for index, node in enumerate(trace.nodes)}
    trained: set[int] = set()
    samples = []
    for branch in trace.branches:
        mask: list[bool] = []
        version: list[int] = []
        for node in branch.nodes:
            index = index_of[id(node)]
            own = index not in trained
            mask += [sampled and own for sampled in node.mask]
            version += [versions.get(index, 0)] * len(node.mask)
            trained.add(index)
        sample = Sample(
            token_ids=branch.token_ids,
            mask=mask,
            logprobs=branch.logprobs,
            versions=version,
            temperature=temperature,
            advantage=0.0,
            task_key=task_key,
            trial_name=trial_name,
        )
        if any(mask[:seq_len]):
            samples.append(cut(sample, seq_len) if len(mask) > seq_len else sample)
    return samples
