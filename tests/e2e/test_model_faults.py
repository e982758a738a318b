"""Real trials with faulty model servers and short timeouts. A trial whose model did not answer is never trained on."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web
from documented_outcomes import GOES_ON, PLACES, SHORT, fault_outcomes
from fakes import DONE, SOLVED, keys, make_task
from faulty_engine import FAULTS, FaultyEngine
from plugin_runs import SAMPLING, config, served
from scripted_engine import Answer, by_turn
from verifiers.v1.clients import ModelContext
from verifiers.v1.trace import Trace
from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config

from harbortrainer.environment.rollout_state import TrialRetriedError
from harbortrainer.environment.verifiers_compat import SamplingConfig, retries

pytestmark = pytest.mark.e2e

SOLVES = by_turn([keys("mkdir -p /app && touch /app/answer", duration=1.0), DONE, DONE])
ATTEMPTS = 2
AGENT_S = 12.0
MESSAGES = {
    "silent": "none of 1 model calls was answered in time",
    "drips": "none of 1 model calls was answered in time",
    "hangs-after-a-turn": "still waiting when the agent's time ended",
}
"""Expected text in the error message of each fault; other faults are not checked."""
NO_RETRY = retries(TrialRetriedError, 0).model_dump()
ONE_RETRY = retries(TrialRetriedError, ATTEMPTS - 1).model_dump()


def outcome(trace: Trace) -> str:
    return trace.info["harbor"]["outcome"]


def assert_outcome(fault: str, trace: Trace, expected: str, attempts: int = ATTEMPTS) -> None:
    """Check the outcome, its message, and that only outcomes other than `model_error` give a reward."""
    assert outcome(trace) == expected, (fault, trace.errors)
    assert MESSAGES.get(fault, "") in (trace.info["harbor"]["error"] or {"message": ""})["message"], fault
    if expected == "model_error":
        assert not trace.ok and not any(trace.rewards.values()), fault
        assert sum(error.message.startswith("model_error:") for error in trace.errors) == attempts, fault
    else:
        assert (trace.ok, trace.reward) == (True, 1.0), fault
        assert any(trace.branches), fault


@pytest.mark.parametrize("place", PLACES)
def test_every_fault_is_documented(place: str) -> None:
    assert set(fault_outcomes(place)) == set(FAULTS)


async def test_server_faults_have_documented_outcomes(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=AGENT_S)
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=SHORT, retries=ONE_RETRY)
    (task,) = load_taskset(resolve_env_config(env).taskset)
    data = task.data.model_dump(mode="json")
    with FaultyEngine(tokenizer_dir, GOES_ON, down_s=1.0) as engine:
        async with served(env, workers=2) as server:
            runs = [server.run(engine.llm_client(fault), engine.model, SAMPLING, data) for fault in FAULTS]
            episodes = await asyncio.gather(*runs)
    for fault, episode in zip(FAULTS, episodes, strict=True):
        assert episode.traces, (fault, episode.errors)
        assert_outcome(fault, cast("Trace", episode.traces[0]), fault_outcomes("local")[fault])


async def play(env: dict, engine: FaultyEngine, fault: str, sampling: SamplingConfig = SAMPLING) -> Trace:
    environment = load_environment(resolve_env_config(env))
    context = ModelContext(client=engine.llm_client(fault), model=engine.model, sampling=sampling)
    (slot,) = [slot for task in environment.taskset for slot in environment.slots(task, 1)]
    async with environment.serving():
        episode = await environment.run_slot(slot, context)
    return episode.traces[0]


@pytest.mark.long
async def test_server_faults_have_documented_outcomes_with_direct_calls(tmp_path: Path, tokenizer_dir: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=AGENT_S)
    with FaultyEngine(tokenizer_dir, GOES_ON, down_s=1.0) as engine:
        envs = []
        for fault in FAULTS:
            harness = SHORT | {"capture": "rollout_details", "vllm_base_url": f"{engine.url}/{fault}/v1"}
            envs.append(config(tmp_path / "tasks", tmp_path / fault, harness=harness, retries=ONE_RETRY))
        traces = await asyncio.gather(*(play(env, engine, fault) for env, fault in zip(envs, FAULTS, strict=True)))
    for fault, trace in zip(FAULTS, traces, strict=True):
        assert_outcome(fault, trace, fault_outcomes("local")[fault])


@pytest.mark.docker
@pytest.mark.long
async def test_server_faults_have_documented_outcomes_in_containers(
    tmp_path: Path, tokenizer_dir: Path, container: str
) -> None:
    """Faults that end as `model_error` are not retried, which keeps the number of containers low."""
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=15.0)
    harness = SHORT | {"environment_type": container, "n_parallel_envs": 4}
    expected = fault_outcomes(container).items()
    retry_configs = {fault: NO_RETRY if outcome == "model_error" else ONE_RETRY for fault, outcome in expected}
    trials = tmp_path / "trials"
    envs = [config(tmp_path / "tasks", trials, harness=harness, retries=retry_configs[fault]) for fault in FAULTS]
    with FaultyEngine(tokenizer_dir, GOES_ON, down_s=1.0) as engine:
        traces = await asyncio.gather(*(play(env, engine, fault) for env, fault in zip(envs, FAULTS, strict=True)))
    for fault, trace in zip(FAULTS, traces, strict=True):
        assert_outcome(fault, trace, fault_outcomes(container)[fault], attempts=1)


class SwitchableEngine(FaultyEngine):
    """Applies `fault` to each request, whatever its path."""

    fault = "none"

    def _fault_of(self, request: web.Request, body: dict) -> str:
        return self.fault


@pytest.mark.long
async def test_stall_limit_uses_all_answers_of_server_in_worker(tmp_path: Path, tokenizer_dir: Path) -> None:
    """After answers of 0.6 s from a server, a wait of 9 s is no stall: `stall_factor` is 30.

    The fault answers the first call immediately and the second never.
    """
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=10.0)
    harness = {"stall_min_s": 1.0, "stall_factor": 30.0, "agent_kwargs": {"model_retries": 0}}
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness, retries=NO_RETRY)
    environment = load_environment(resolve_env_config(env))
    (task,) = environment.taskset
    with SwitchableEngine(tokenizer_dir, SOLVES, slow_s=0.6) as engine:

        async def outcome_of(fault: str, server: str) -> str:
            engine.fault = fault
            context = ModelContext(client=engine.llm_client(server), model=engine.model, sampling=SAMPLING)
            (slot,) = environment.slots(task, 1)
            return outcome((await environment.run_slot(slot, context)).traces[0])

        async with environment.serving():
            assert [await outcome_of("slow", "one") for _ in range(2)] == ["completed"] * 2
            model_list_calls = engine.model_list_calls
            assert await outcome_of("hangs-after-a-turn", "one") == "agent_timeout"
            assert engine.model_list_calls == model_list_calls, "the model list is requested once per server"
            assert await outcome_of("hangs-after-a-turn", "other") == "model_error"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["hangs-after-a-turn", "answers-500"])
async def test_server_fault_with_harbor_terminus_is_model_error(
    tmp_path: Path, tokenizer_dir: Path, fault: str
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=2 * AGENT_S)
    harness = SHORT | {"agent": "terminus-2", "agent_kwargs": {"record_terminal_session": False}}
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness, retries=NO_RETRY)
    # With short answers, a long wait counts as a stall even if a busy machine made the first answer slow.
    short = SamplingConfig(temperature=1.0, max_tokens=128)
    with FaultyEngine(tokenizer_dir, GOES_ON) as engine:
        trace = await play(env, engine, fault, short)
    assert (outcome(trace), trace.ok) == ("model_error", False)


@pytest.mark.parametrize(
    ("agent_timeout", "expected"),
    [("verify", ("agent_timeout", 1.0)), ("zero", ("agent_timeout", 0.0)), ("mask", ("timeout_masked", None))],
)
async def test_agent_timeout_setting_decides_reward(
    tmp_path: Path, tokenizer_dir: Path, agent_timeout: str, expected: tuple
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=3.0)
    env = config(tmp_path / "tasks", tmp_path / "trials", harness={"agent_timeout": agent_timeout})
    with FaultyEngine(tokenizer_dir, GOES_ON, slow_s=0.5) as engine:
        trace = await play(env, engine, "slow")
    record = trace.info["harbor"]
    assert (record["outcome"], record["reward"]) == expected
    assert record["rewards"] == {"reward": 1.0}, "the record keeps the verifier's reward"
    assert trace.ok == (agent_timeout != "mask")
    assert trace.metrics[f"outcome_{expected[0]}"] == 1.0
    assert len(list((tmp_path / "trials").glob("*/result.json"))) == 1, "a timeout is never retried"
    if trace.ok:
        assert trace.reward == expected[1]


@pytest.mark.parametrize(("agent_timeout", "reward"), [("verify", 0.5), ("zero", 0.0), ("mask", None)])
async def test_agent_timeout_of_one_step_applies_to_whole_trial(
    tmp_path: Path, tokenizer_dir: Path, agent_timeout: str, reward: float | None
) -> None:
    steps = {"first": SOLVED, "second": "echo 0 > /logs/verifier/reward.txt"}
    make_task(tmp_path / "tasks" / "steps", steps=steps, agent_timeout_s=4.0)

    def script(prompt: str) -> Answer:
        return (SOLVES if "Step first" in prompt else GOES_ON)(prompt)

    env = config(tmp_path / "tasks", tmp_path / "trials", harness={"agent_timeout": agent_timeout})
    with FaultyEngine(tokenizer_dir, script) as engine:
        trace = await play(env, engine, "none")
    record = trace.info["harbor"]
    assert [step["outcome"] for step in record["steps"]] == ["completed", "agent_timeout"]
    assert [step["rewards"] for step in record["steps"]] == [{"reward": 1.0}, {"reward": 0.0}]
    assert record["reward"] == reward
    assert trace.ok == (agent_timeout != "mask")
