"""Samples from verifiers' traces: branches, shared nodes, versions, and checks of every trained token."""

import pytest
from sabotages import drop_turn
from verifiers.v1.episode import WireEpisode

from harbortrainer.config.algorithm_config import Algo, LengthPenalty
from harbortrainer.engines.local.rollouts.group import Group
from harbortrainer.engines.local.rollouts.rollout import Rollout
from harbortrainer.engines.local.rollouts.schedule import Plan
from harbortrainer.engines.local.rollouts.trace_samples import fill_rollout
from harbortrainer.engines.local.sampler.completion_log import Completion
from harbortrainer.environment.episode_end import episode_outcome, outcome_from_message
from harbortrainer.errors import ProofError
from harbortrainer.trials.outcome import Outcome


def node(parent, tokens, sampled=0, logprobs=()):
    """Return a message whose last `sampled` tokens come from the model."""
    role = "assistant" if sampled else "user"
    return {
        "parent": parent,
        "message": {"role": role, "content": "x"},
        "sampled": bool(sampled),
        "token_ids": tokens,
        "mask": [False] * (len(tokens) - sampled) + [True] * sampled,
        "logprobs": list(logprobs),
    }


ONE_BRANCH = [
    node(None, [1, 2]),
    node(0, [3, 10, 11], 2, [-0.1, -0.2]),
    node(1, [4, 5]),
    node(2, [6, 12], 1, [-0.3]),
]
COMPLETIONS = [
    Completion("t", "r1", 3, (10, 11), (-0.1, -0.2), 4),
    Completion("t", "r2", 8, (12,), (-0.3,), 5),
]


def episode(nodes, *, ok=True, record=None, reward=1.0, errors=(), calls=()):
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
        "calls": list(calls),
    }
    return WireEpisode.model_validate({"task": task, "ok": ok, "traces": [trace]})


def build_rollout(episode, completions=COMPLETIONS, seq_len=100, roles=()):
    rollout = Rollout(source="s", task="fix", task_key="k", outcome=Outcome.agent_error)
    return fill_rollout(rollout, episode, completions, temperature=1.0, seq_len=seq_len, roles=dict(roles))


def test_one_branch_is_one_sample_with_version_per_turn():
    rollout = build_rollout(episode(ONE_BRANCH))
    (sample,) = rollout.samples
    assert sample.token_ids == [1, 2, 3, 10, 11, 4, 5, 6, 12]
    assert [i for i, m in enumerate(sample.mask) if m] == [3, 4, 8]
    assert [sample.versions[i] for i in (3, 4, 8)] == [4, 4, 5]
    assert [sample.logprobs[i] for i in (3, 4, 8)] == pytest.approx([-0.1, -0.2, -0.3])
    assert (rollout.version, rollout.reward) == (4, 1.0)


ECHO = {"user": 0.5}.items()


def user_message(parent, tokens, is_content):
    """Return a user message with the mask of its content tokens."""
    return node(parent, tokens) | {"is_content": is_content}


def test_echo_predicts_messages_after_first_answer():
    (sample,) = build_rollout(episode(ONE_BRANCH), roles=ECHO).samples
    assert sample.ce_weights == [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]
    assert build_rollout(episode(ONE_BRANCH)).samples[0].ce_weights is None
    assert build_rollout(episode(ONE_BRANCH), roles={"tool": 0.1}.items()).samples[0].ce_weights is None


def test_echo_predicts_message_body_only():
    nodes = [*ONE_BRANCH[:2], user_message(1, [4, 5], [False, True]), ONE_BRANCH[3]]
    (sample,) = build_rollout(episode(nodes), roles=ECHO).samples
    assert sample.ce_weights == [0, 0, 0, 0, 0, 0, 0.5, 0, 0]


def test_echo_predicts_shared_message_once():
    two_branches = [*ONE_BRANCH, node(2, [8, 13], 1, [-0.4])]
    completions = [*COMPLETIONS, Completion("t", "r3", 8, (13,), (-0.4,), 6)]
    first, second = build_rollout(episode(two_branches), completions, roles=ECHO).samples
    assert first.ce_weights == [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]
    assert second.ce_weights is None
    (cut,) = build_rollout(episode(ONE_BRANCH), seq_len=5, roles=ECHO).samples
    assert cut.ce_weights is None


def test_echo_predicts_shared_message_in_the_branch_that_trains():
    """The second branch shares its message with the third, and its own answer lies behind `seq_len`."""
    nodes = [
        *ONE_BRANCH[:2],
        *(node(1, [7]), node(2, [6, 14], 1, [-0.5])),
        *(node(1, [4, 5]), node(4, [6, 6, 6, 6, 12], 1, [-0.3]), node(4, [8, 13], 1, [-0.4])),
    ]
    later = [(7, 14, -0.5), (11, 12, -0.3), (8, 13, -0.4)]
    completions = [
        COMPLETIONS[0],
        *(Completion("t", f"r{length}", length, (token,), (logprob,), 5) for length, token, logprob in later),
    ]
    first, third = build_rollout(episode(nodes), completions, seq_len=9, roles=ECHO).samples
    assert first.ce_weights == [0, 0, 0, 0, 0, 0.5, 0, 0]
    assert third.ce_weights == [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]


def test_shared_node_trains_once():
    two_branches = [*ONE_BRANCH, node(1, [7]), node(4, [8, 13], 1, [-0.4])]
    completions = [*COMPLETIONS, Completion("t", "r3", 7, (13,), (-0.4,), 6)]
    first, second = build_rollout(episode(two_branches), completions).samples
    assert [i for i, m in enumerate(first.mask) if m] == [3, 4, 8]
    assert second.token_ids == [1, 2, 3, 10, 11, 7, 8, 13]
    assert [i for i, m in enumerate(second.mask) if m] == [7]


def test_length_penalty_counts_shared_tokens_in_each_branch():
    """Two branches share the first answer and have one more answer each; verifiers counts the tokens."""
    two_branches = [*ONE_BRANCH, node(1, [7]), node(4, [8, 13], 1, [-0.4])]
    completions = [*COMPLETIONS, Completion("t", "r3", 7, (13,), (-0.4,), 6)]
    usage = [(1, 3, 2), (3, 8, 1), (5, 7, 1)]
    calls = [{"node": n, "usage": {"prompt_tokens": p, "completion_tokens": c}} for n, p, c in usage]
    forked, plain = (
        build_rollout(episode(two_branches, calls=calls), completions),
        build_rollout(episode(ONE_BRANCH, calls=calls[:2])),
    )
    assert (forked.output_tokens, forked.total_output_tokens, forked.total_tokens) == (4, 6, 17)
    assert forked.reward_snapshot is not None and forked.reward_snapshot.lengths == (6, 11, 3)
    group = Group(id="g", plan=Plan("s", 0), size=2, algo=Algo(length_penalty=LengthPenalty()), started=True)
    group.rollouts = [forked, plain]
    # Each trial's counts over the largest: 6/6 and 3/6 (weight 0.25), 11/11 and 6/11 (0.1), 3/3 and 2/3 (0.1).
    penalties = [0.25 + 0.1 + 0.1, 0.125 + 0.1 * 6 / 11 + 0.1 * 2 / 3]
    assert group.advantages() == pytest.approx([(penalties[1 - i] - penalties[i]) / 2 for i in range(2)])


def test_costs_cover_every_call():
    """Some agents of Harbor report no token counts; late completions cost too."""
    usage = [(1, 3, 0, 2), (3, 8, 2, 1), (None, 12, 0, 4)]
    names = "prompt_tokens", "cached_input_tokens", "completion_tokens"
    calls = [{"node": at, "usage": dict(zip(names, counts, strict=True))} for at, *counts in usage]
    rollout = build_rollout(episode(ONE_BRANCH, calls=calls))
    assert (rollout.prompt_tokens, rollout.sampled_tokens) == (25, 7)


def test_truncates_sample_at_seq_len():
    cut = build_rollout(episode(ONE_BRANCH), seq_len=4)
    assert cut.samples[0].token_ids == [1, 2, 3, 10]
    assert (cut.truncated_samples, cut.truncated_tokens) == (1, 2)
    whole = build_rollout(episode(ONE_BRANCH), seq_len=9)
    assert (whole.truncated_samples, whole.truncated_tokens) == (0, 0)


def test_refuses_token_that_was_not_sampled():
    forged = [ONE_BRANCH[0], node(0, [3, 10, 99], 2, [-0.1, -0.2]), *ONE_BRANCH[2:]]
    with pytest.raises(ProofError, match="not what the engine sampled"):
        build_rollout(episode(forged))


def test_refuses_logprob_that_was_not_reported():
    forged = [ONE_BRANCH[0], node(0, [3, 10, 11], 2, [-0.2, -0.1]), *ONE_BRANCH[2:]]
    with pytest.raises(ProofError, match="log-probabilities"):
        build_rollout(episode(forged))


def test_refuses_turn_with_another_prompt_length():
    longer = [node(None, [1, 2, 2]), *ONE_BRANCH[1:]]
    with pytest.raises(ProofError, match="follows 4 tokens in the trace, but the engine sampled it after 3"):
        build_rollout(episode(longer))


TURNS = [*ONE_BRANCH, node(3, [7, 8]), node(4, [9, 13], 1, [-0.5])]
CALLS = [{"node": 1}, {"node": 3}, {"node": 5}]
COMPLETIONS_OF_TURNS = [*COMPLETIONS, Completion("t", "r3", 12, (13,), (-0.5,), 5)]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (1, "a turn follows 3 tokens in the trace, but the engine sampled it after 8"),
        (3, "a turn follows 8 tokens in the trace, but the engine sampled it after 12"),
        (5, "1 completions of the engine are not turns of this trial's trace"),
    ],
)
def test_refuses_missing_turn(turn, message):
    whole = episode(TURNS, calls=CALLS)
    assert len(build_rollout(whole, COMPLETIONS_OF_TURNS).samples) == 1
    drop_turn(whole.traces[0], turn)
    with pytest.raises(ProofError, match=message):
        build_rollout(whole, COMPLETIONS_OF_TURNS)


def test_late_completion_is_not_a_missing_turn():
    late = [{"node": 1}, {"node": 3}, {"node": None}]
    assert len(build_rollout(episode(ONE_BRANCH, calls=late), COMPLETIONS_OF_TURNS).samples) == 1
    with pytest.raises(ProofError, match="A turn is missing"):
        build_rollout(episode(ONE_BRANCH, calls=late[:2]), COMPLETIONS_OF_TURNS)


def test_agent_timeout_may_drop_one_completion():
    record = {"outcome": "agent_timeout", "task": "fix", "reward": 1.0}
    assert len(build_rollout(episode(ONE_BRANCH, record=record, calls=CALLS[:2]), COMPLETIONS_OF_TURNS).samples) == 1
    twice = [*COMPLETIONS_OF_TURNS, Completion("t", "r4", 20, (14,), (-0.5,), 5)]
    with pytest.raises(ProofError, match=r"2 completions .* records only 1 as dropped"):
        build_rollout(episode(ONE_BRANCH, record=record, calls=CALLS[:2]), twice)


def test_failed_trial_has_no_sample_and_no_reward():
    record = {"outcome": "sandbox_error", "task": "fix", "trial_name": "fix__1"}
    error = {"type": "TrialFailedError", "message": "sandbox_error: it died"}
    rollout = build_rollout(episode(ONE_BRANCH, ok=False, record=record, errors=[error]))
    assert (rollout.outcome, rollout.reward, rollout.samples) == ("sandbox_error", None, [])
    assert rollout.error == "sandbox_error: it died"


def test_long_error_keeps_its_end():
    error = {"type": "TrialFailedError", "message": f"sandbox_error: no build: {'output ' * 200}\nthe cause"}
    rollout = build_rollout(episode(ONE_BRANCH, ok=False, errors=[error]))
    assert rollout.error and rollout.error.startswith("sandbox_error: no build: output")
    assert rollout.error.endswith("output the cause") and len(rollout.error) < 510


def test_failed_trace_never_trains():
    record = {"outcome": "completed", "task": "fix", "reward": 1.0}
    error = {"type": "RolloutError", "message": "scoring fell over"}
    rollout = build_rollout(episode(ONE_BRANCH, ok=False, record=record, errors=[error]))
    assert (rollout.outcome, rollout.reward, rollout.samples) == ("agent_error", None, [])


def test_trial_at_limit_trains_with_verifier_reward():
    rollout = build_rollout(
        episode(ONE_BRANCH, record={"outcome": "turn_limit", "task": "fix", "reward": 0.0}, reward=0.0)
    )
    assert (rollout.outcome, rollout.reward, len(rollout.samples)) == ("turn_limit", 0.0, 1)


def test_episode_without_trace_is_a_failure():
    empty = WireEpisode.model_validate(
        {"task": {"type": "T", "data": {}}, "errors": [{"type": "E", "message": "boom"}]}
    )
    assert episode_outcome(empty, None) == ("agent_error", "E: boom")


@pytest.mark.parametrize(
    ("message", "outcome"),
    [("model_error: 500", "model_error"), ("completed: odd", "agent_error"), ("boom", "agent_error")],
)
def test_outcome_from_first_word_of_error(message, outcome):
    assert outcome_from_message(message) == outcome
