"""From verifiers' episode to samples: branches, shared nodes, versions, and the identity of every trained token."""

import pytest
from verifiers.v1.episode import WireEpisode

from harbortrainer.engines.local.learner.proof import ProofError
from harbortrainer.engines.local.sampler.ledger import Completion
from harbortrainer.engines.local.samples import blame, outcome_in, rollout_of


def node(parent, tokens, sampled=0, logprobs=()):
    """A message whose last `sampled` tokens the model sampled."""
    role = "assistant" if sampled else "user"
    return {
        "parent": parent,
        "message": {"role": role, "content": "x"},
        "sampled": bool(sampled),
        "token_ids": tokens,
        "mask": [False] * (len(tokens) - sampled) + [True] * sampled,
        "logprobs": list(logprobs),
    }


CHAIN = [
    node(None, [1, 2]),
    node(0, [3, 10, 11], 2, [-0.1, -0.2]),
    node(1, [4, 5]),
    node(2, [6, 12], 1, [-0.3]),
]
LEDGER = [
    Completion("t", "r1", 3, (10, 11), (-0.1, -0.2), 4),
    Completion("t", "r2", 8, (12,), (-0.3,), 5),
]


def episode(nodes, *, ok=True, record=None, reward=1.0, errors=()):
    task = {"type": "T", "data": {"name": "fix"}, "key": "k"}
    trace = {
        "id": "t",
        "task": task,
        "agent": {"config": {}},
        "nodes": nodes,
        "ok": ok,
        "rewards": {"reward": {"score": reward}} if reward is not None else {},
        "info": {"harbor": record} if record else {},
        "errors": list(errors),
    }
    return WireEpisode.model_validate({"task": task, "ok": ok, "traces": [trace]})


def build(episode, ledger=LEDGER, seq_len=100):
    return rollout_of(episode, ledger, source="s", task="fix", task_key="k", temperature=1.0, seq_len=seq_len)


def test_one_branch_is_one_sample_with_the_version_of_each_turn():
    rollout = build(episode(CHAIN))
    (sample,) = rollout.samples
    assert sample.token_ids == [1, 2, 3, 10, 11, 4, 5, 6, 12]
    assert [i for i, m in enumerate(sample.mask) if m] == [3, 4, 8]
    assert [sample.versions[i] for i in (3, 4, 8)] == [4, 4, 5]
    assert [sample.logprobs[i] for i in (3, 4, 8)] == [-0.1, -0.2, -0.3]
    assert (rollout.version, rollout.newest_version, rollout.reward) == (4, 5, 1.0)


def test_a_node_that_branches_share_trains_once():
    fork = [*CHAIN, node(1, [7]), node(4, [8, 13], 1, [-0.4])]
    ledger = [*LEDGER, Completion("t", "r3", 7, (13,), (-0.4,), 6)]
    one, other = build(episode(fork), ledger).samples
    assert [i for i, m in enumerate(one.mask) if m] == [3, 4, 8]
    assert other.token_ids == [1, 2, 3, 10, 11, 7, 8, 13]
    assert [i for i, m in enumerate(other.mask) if m] == [7]


def test_a_sample_is_cut_at_seq_len():
    (sample,) = build(episode(CHAIN), seq_len=4).samples
    assert sample.token_ids == [1, 2, 3, 10]


def test_a_token_the_sampler_did_not_sample_is_refused():
    forged = [CHAIN[0], node(0, [3, 10, 99], 2, [-0.1, -0.2]), *CHAIN[2:]]
    with pytest.raises(ProofError, match="not what the engine sampled"):
        build(episode(forged))


def test_a_log_probability_the_sampler_did_not_give_is_refused():
    forged = [CHAIN[0], node(0, [3, 10, 11], 2, [-0.2, -0.1]), *CHAIN[2:]]
    with pytest.raises(ProofError, match="log-probabilities"):
        build(episode(forged))


def test_a_turn_behind_another_prompt_is_refused():
    longer = [node(None, [1, 2, 2]), *CHAIN[1:]]
    with pytest.raises(ProofError, match="after 4 tokens in the trace, but the engine sampled it after 3"):
        build(episode(longer))


def test_a_failed_trial_has_no_sample_and_no_reward():
    record = {"outcome": "sandbox_error", "task": "fix", "trial_name": "fix__1"}
    error = {"type": "TrialFailedError", "message": "sandbox_error: it died"}
    rollout = build(episode(CHAIN, ok=False, record=record, errors=[error]))
    assert (rollout.outcome, rollout.reward, rollout.samples) == ("sandbox_error", None, [])
    assert "it died" in (rollout.error or "")


def test_a_trace_that_is_not_ok_never_trains_whatever_its_record_says():
    record = {"outcome": "completed", "task": "fix", "reward": 1.0}
    error = {"type": "RolloutError", "message": "scoring fell over"}
    rollout = build(episode(CHAIN, ok=False, record=record, errors=[error]))
    assert (rollout.outcome, rollout.reward, rollout.samples) == ("agent_error", None, [])


def test_a_limit_trains_with_the_verifiers_reward():
    rollout = build(episode(CHAIN, record={"outcome": "turn_limit", "task": "fix"}, reward=0.0))
    assert (rollout.outcome, rollout.reward, len(rollout.samples)) == ("turn_limit", 0.0, 1)


def test_an_episode_without_a_trace_is_a_failure():
    empty = WireEpisode.model_validate(
        {"task": {"type": "T", "data": {}}, "errors": [{"type": "E", "message": "boom"}]}
    )
    assert blame(empty) == {"outcome": "agent_error", "error": "E: boom"}


@pytest.mark.parametrize(
    ("message", "outcome"),
    [("model_error: 500", "model_error"), ("completed: odd", "agent_error"), ("boom", "agent_error")],
)
def test_the_word_an_error_starts_with_is_its_outcome(message, outcome):
    assert outcome_in(message) == outcome
