"""Episodes of the plugin: real trials, sandbox and interception endpoint, with a scripted model."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from fakes import DONE, SOLVED, keys, make_task
from patience import HANG_S
from plugin_runs import SAMPLING, config, most_at_once, play, play_one
from scripted_engine import Answer, ScriptedEngine, by_turn
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Trace

from harbortrainer.runs.trace_transcript import as_list

pytestmark = pytest.mark.e2e

SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])
NEVER_DONE = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), keys("ls")])
NO_REWARD = "true"


def sampled_turns(trace: Trace) -> list[tuple[list[int], list[int], list[float]]]:
    """Return prompt, answer and log-probabilities of each turn; the trace must have one branch."""
    (branch,) = trace.branches
    turns, before = [], []
    for node in branch.nodes:
        tokens = as_list(node.token_ids)
        answer = [token for token, trained in zip(tokens, node.mask, strict=True) if trained]
        if node.sampled:
            # float32 in verifiers 0.4.1
            turns.append((before + tokens[: len(tokens) - len(answer)], answer, pytest.approx(as_list(node.logprobs))))
        before = before + tokens
    return turns


async def test_trace_has_exactly_the_sampled_tokens(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials"), engine)
    assert trace.ok
    assert trace.reward == 1.0
    assert sampled_turns(trace) == [(s.prompt_ids, s.token_ids, s.logprobs) for s in engine.samples]
    assert {s.session for s in engine.samples} == {trace.id}
    record = trace.info["harbor"]
    assert (record["outcome"], record["turns"], record["reward"]) == ("completed", 3, 1.0)
    assert trace.metrics["outcome_completed"] == 1.0
    assert (trace.metrics["time_agent_execution"] or 0) > 0
    json.dumps(record)


@pytest.mark.skipif("top_logprobs" not in MessageNode.model_fields, reason="since verifiers 0.4.1")
async def test_trace_has_policy_versions_and_candidates_of_each_answer(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    env = config(tmp_path / "tasks", tmp_path / "trials")
    sampling = SAMPLING.model_copy(update={"logprobs": 2})
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        (episode,) = await play(env, engine, sampling=sampling)
    (trace,) = episode.traces
    assert trace.ok and trace.reward == 1.0
    answers = [node for node in trace.nodes if node.sampled]
    assert len(answers) == len(engine.samples) == 3
    for node, sampled in zip(answers, engine.samples, strict=True):
        versions, candidates = (getattr(node, name) for name in ("weight_versions", "top_logprobs"))
        spans = [(span.version, span.start, span.end) for span in versions]
        assert spans == [("step-1", 0, 1), ("step-2", 1, len(sampled.token_ids))]
        assert candidates.ids.reshape(-1, 2).tolist() == [[token, token + 1] for token in sampled.token_ids]


async def test_concurrent_episodes_have_one_branch_each(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        episodes = await play(config(tmp_path / "tasks", tmp_path / "trials"), engine, times=6)
    traces = [trace for episode in episodes for trace in episode.traces]
    assert [(trace.ok, trace.reward, len(trace.branches)) for trace in traces] == [(True, 1.0, 1)] * 6
    assert len({trace.info["harbor"]["trial_name"] for trace in traces}) == 6


@pytest.mark.parametrize("limit", [{"max_turns": 3}, {"harness": {"max_turns": 3}}])
async def test_turn_limit_keeps_verifier_reward(tmp_path: Path, tokenizer_dir: Path, limit: dict) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, NEVER_DONE) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", **limit), engine)
    assert trace.ok, trace.errors
    assert trace.info["harbor"]["outcome"] == "turn_limit"
    assert (trace.reward, trace.num_turns, engine.calls) == (1.0, 3, 3)
    assert trace.is_truncated, "is_truncated/mean counts it"


@pytest.mark.parametrize(
    ("limit", "turns"), [({"max_turns": 3}, [3, 0]), ({"max_turns": 20, "harness": {"max_turns": 2}}, [2, 2])]
)
async def test_step_without_turn_is_reported(
    tmp_path: Path, tokenizer_dir: Path, limit: dict, turns: list[int]
) -> None:
    make_task(tmp_path / "tasks" / "answer", steps={"first": SOLVED, "second": "echo 0 > /logs/verifier/reward.txt"})
    with ScriptedEngine(tokenizer_dir, NEVER_DONE) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", **limit), engine)
    record = trace.info["harbor"]
    assert (record["outcome"], [step["turns"] for step in record["steps"]]) == ("turn_limit", turns)
    assert trace.metrics["steps_without_turn"] == turns.count(0)
    assert (trace.reward, engine.calls) == (0.5, sum(turns))


async def test_verifier_failure_after_turn_limit_is_an_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", test=NO_REWARD)
    with ScriptedEngine(tokenizer_dir, NEVER_DONE) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", max_turns=2), engine)
    assert not trace.ok
    assert trace.errors[-1].message.startswith("verifier_error:")
    assert trace.reward == 0 and not any(trace.rewards.values()), "no reward was recorded"
    assert engine.calls == 4, "the trial was retried once"
    assert trace.num_turns == 2, "the trace has the tokens of one attempt only"


@pytest.mark.parametrize(
    ("on_tampering", "outcome", "reward"),
    [("flag", "completed", 1.0), ("zero", "completed", 0.0), ("drop", "tampered", 0)],
)
async def test_on_tampering_sets_reward_of_changed_tools(
    tmp_path: Path, tokenizer_dir: Path, on_tampering: str, outcome: str, reward: float
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    cheats = by_turn([keys("mkdir -p /app; touch /app/answer; cp /bin/true /usr/local/bin/cat"), DONE, DONE])
    env = config(tmp_path / "tasks", tmp_path / "trials", harness={"on_tampering": on_tampering})
    with ScriptedEngine(tokenizer_dir, cheats) as engine:
        trace = await play_one(env, engine)
    record = trace.info["harbor"]
    assert (record["outcome"], trace.reward, engine.calls) == (outcome, reward, 3), record
    assert trace.ok is (on_tampering != "drop")
    assert record["rewards"] == {"reward": 1.0}, "the record keeps the verifier's reward"
    assert ["/usr/local/bin/cat was added" in change for change in record["changed_tools"]] == [True]


async def test_unreachable_engine_is_model_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    down = by_turn([keys("mkdir -p /app && touch /app/answer"), Answer(status=500)])
    harness = {"agent_kwargs": {"model_retries": 0}}
    with ScriptedEngine(tokenizer_dir, down) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness), engine)
    assert not trace.ok
    assert trace.errors[-1].message.startswith("model_error:")
    assert trace.info["harbor"]["outcome"] == "model_error"
    assert engine.calls == 6, "two retries"


async def test_overlong_prompt_is_context_limit_with_reward(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    long = by_turn([keys("mkdir -p /app && touch /app/answer"), keys(*["echo " + "x" * 400] * 8)])
    with ScriptedEngine(tokenizer_dir, long, max_model_len=6000) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials"), engine)
    assert trace.ok, trace.errors
    assert trace.info["harbor"]["outcome"] == "context_limit"
    assert trace.reward == 1.0


async def test_late_completion_does_not_train(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=2.0, test="sleep 3; echo 1 > /logs/verifier/reward.txt")
    late = by_turn([keys("ls"), Answer(DONE, delay_s=4.0)])
    with ScriptedEngine(tokenizer_dir, late) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials"), engine)
    assert trace.ok, trace.errors
    assert trace.info["harbor"]["outcome"] == "agent_timeout"
    assert len(engine.samples) == 2, "the engine sampled the late completion"
    assert sampled_turns(trace) == [(s.prompt_ids, s.token_ids, s.logprobs) for s in engine.samples[:1]]


@pytest.mark.parametrize("status", [400, 500])
async def test_call_that_fails_during_grading_keeps_the_reward(
    tmp_path: Path, tokenizer_dir: Path, status: int
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=2.0, test="sleep 4; echo 1 > /logs/verifier/reward.txt")
    fails = by_turn([keys("ls"), Answer(status=status, delay_s=4.0)])
    with ScriptedEngine(tokenizer_dir, fails) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials"), engine)
    assert trace.ok, trace.errors
    assert (trace.info["harbor"]["outcome"], trace.reward) == ("agent_timeout", 1.0)


async def test_unstartable_sandbox_is_retried_without_reward(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    harness = {"environment_type": "e2e_environments:WillNotStart"}
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        started = time.monotonic()
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness), engine)
    assert time.monotonic() - started >= 1 + 2 + 4, "each retry waited"
    assert not trace.ok
    messages = [error.message for error in trace.errors]
    assert all(message.startswith("sandbox_error:") for message in messages)
    assert len(messages) == 4, "three retries"
    assert engine.calls == 0
    assert trace.info["harbor"]["failed_attempts"] == 3


async def test_record_counts_failed_attempts(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    harness = {"environment_type": "e2e_environments:StartsTheSecondTime"}
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness), engine)
    assert trace.ok, trace.errors
    assert (trace.reward, trace.metrics["failed_attempts"]) == (1.0, 1.0)


async def test_multi_step_trial_is_one_episode_with_all_branches(tmp_path: Path, tokenizer_dir: Path) -> None:
    solved = "test -f /app/answer && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    make_task(tmp_path / "tasks" / "steps", steps={"one": solved, "two": solved})
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials"), engine)
    assert trace.ok, trace.errors
    assert trace.reward == 1.0
    assert [step["name"] for step in trace.info["harbor"]["steps"]] == ["one", "two"]
    assert len(trace.branches) == 2
    sampled = [[t for t, trained in zip(b.token_ids, b.sampled_mask, strict=True) if trained] for b in trace.branches]
    expected = [[t for s in engine.samples[i : i + 3] for t in s.token_ids] for i in (0, 3)]
    assert sampled == expected


async def test_parallel_trials_do_not_exceed_cap(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        env = config(tmp_path / "tasks", tmp_path / "trials", harness={"n_parallel_envs": 2})
        episodes = await play(env, engine, times=5)
    assert all(episode.ok for episode in episodes)
    assert most_at_once(tmp_path / "trials") == 2


async def test_reward_dictionary_gives_metrics_and_scalar_reward(tmp_path: Path, tokenizer_dir: Path) -> None:
    verdict = """echo '{"speed": 1.0, "style": 0.5}' > /logs/verifier/reward.json"""
    make_task(tmp_path / "tasks" / "answer", test=verdict)
    with ScriptedEngine(tokenizer_dir, SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials"), engine)
    assert trace.reward == 0.75
    assert (trace.metrics["reward_speed"], trace.metrics["reward_style"]) == (1.0, 0.5)


async def test_harbor_terminus_runs_through_endpoint(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    harness = {"agent": "terminus-2", "agent_kwargs": {"record_terminal_session": False}}
    with ScriptedEngine(tokenizer_dir, NEVER_DONE) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness, max_turns=2), engine)
    assert trace.ok, trace.errors
    assert (trace.reward, trace.num_turns) == (1.0, 2)


async def test_unknown_environment_type_is_named(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    harness = {"environment_type": "dokcer"}
    with (
        ScriptedEngine(tokenizer_dir, SOLVES) as engine,
        pytest.raises(ValueError, match=r"unknown environment type 'dokcer'; did you mean 'docker'\?"),
    ):
        await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness), engine)


async def test_cancelled_episode_leaves_no_sandbox(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer")
    hangs = by_turn([Answer(DONE, delay_s=600.0)])
    with ScriptedEngine(tokenizer_dir, hangs) as engine:
        task = asyncio.create_task(play(config(tmp_path / "tasks", tmp_path / "trials"), engine))
        assert await asyncio.to_thread(engine.called.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(HANG_S):
                await task
    (folder,) = [p for p in (tmp_path / "trials").iterdir() if p.is_dir() and not p.name.startswith(".")]
    assert json.loads((folder / "result.json").read_text())["finished_at"]
