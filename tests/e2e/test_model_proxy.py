"""An agent in its sandbox reaches only the model, and the sampled tokens are captured."""

import json
from pathlib import Path

import inside_agents
import pytest
from fakes import make_task
from plugin_runs import config, play, play_one
from renderers import Qwen3RendererConfig
from scripted_engine import Script, ScriptedEngine, by_turn
from verifiers.v1.trace import Trace

from harbortrainer.sandbox import container_sockets
from tiny_policy.prompts import episode
from tiny_policy.tokenizer import train_tokenizer

pytestmark = pytest.mark.e2e

NO_NETWORK = "[environment]\nallow_internet = false"


def bash_call(command: str, text: str = "") -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{text}<tool_call>\n{call}\n</tool_call>"


THOUGHT = "<think>\nI think of it.\n</think>\n\n"
THINKS_AND_SOLVES = by_turn([THOUGHT + bash_call("mkdir -p /app && touch /app/answer"), THOUGHT + "Done."])
SOLVES = by_turn([bash_call("mkdir -p /app && touch /app/answer; env", "I look.\n\n"), bash_call("ls /app"), "Done."])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer with Qwen3's special tokens and chat template."""
    folder = tmp_path_factory.mktemp("qwen3")
    train_tokenizer([episode("Create the file /app/answer.", ["touch /app/answer"])]).save_pretrained(folder)
    return folder


def engine_of(qwen3: Path, script: Script = SOLVES) -> ScriptedEngine:
    return ScriptedEngine(qwen3, script, format=Qwen3RendererConfig(thinking_retention="all"))


def harness(agent: str, **more: object) -> dict:
    return {"agent": f"inside_agents:{agent}", "environment_kwargs": {"image": "host"}} | more


def assert_captured(trace: Trace, engine: ScriptedEngine) -> None:
    """Check that the trace is one branch with exactly the sampled tokens and log-probabilities."""
    (branch,) = trace.branches
    sampled = [node for node in branch.nodes if node.sampled]
    kept = [[t for t, trained in zip(node.token_ids, node.mask, strict=True) if trained] for node in sampled]
    assert kept == [sample.token_ids for sample in engine.samples]
    assert [node.logprobs for node in sampled] == [sample.logprobs for sample in engine.samples]


async def test_agent_in_sandbox_reaches_model_without_network(tmp_path: Path, qwen3: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness("ProbingAgent"))
    with engine_of(qwen3) as engine:
        trace = await play_one(env, engine)
    record = trace.info["harbor"]
    assert (record["outcome"], trace.reward, engine.calls) == ("completed", 1.0, 3), record
    assert_captured(trace, engine)
    statuses = dict(inside_agents.ProbingAgent.observed)
    key = str(statuses.pop("key"))
    assert statuses == {"another key": 401, "no key": 401, "another path": 404, "parent path": 404, "no request": 400}
    tool_outputs = [str(node.message.content) for node in trace.nodes if node.message.role == "tool"]
    assert "OPENAI_API_KEY=[REDACTED]" in tool_outputs[0], "the agent printed the key; the model must not see it"
    assert key not in trace.model_dump_json()
    kept = [path for path in (tmp_path / "trials").rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if key.encode() in path.read_bytes()]


async def test_flood_from_sandbox_is_refused_and_trial_completes(tmp_path: Path, qwen3: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness("FloodingAgent"))
    with engine_of(qwen3) as engine:
        trace = await play_one(env, engine)
    assert [line.split()[1] for line in inside_agents.FloodingAgent.observed if line] == ["413"] * 8
    assert (trace.info["harbor"]["outcome"], trace.reward, engine.calls) == ("completed", 1.0, 3)
    assert_captured(trace, engine)


async def test_agent_passes_no_run_keys_into_sandbox(
    tmp_path: Path, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "SEARCH_API_KEY", "GIVEN_API_KEY"):
        monkeypatch.setenv(name, f"the run's own {name}".replace(" ", "-"))
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    own = harness("KeyForwardingAgent", env={"GIVEN_API_KEY": "${GIVEN_API_KEY}"})
    with engine_of(qwen3) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=own), engine)
    assert (trace.info["harbor"]["outcome"], trace.reward) == ("completed", 1.0)
    variables = dict(line.split("=", 1) for line in inside_agents.KeyForwardingAgent.observed)
    assert variables.pop("GIVEN_API_KEY") == "the-run's-own-GIVEN_API_KEY", "the run file passes this key"
    assert variables.keys() <= {"OPENAI_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY"}
    assert "own" not in "".join(variables.values()), "these are the proxy's keys"


async def test_concurrent_agents_have_their_own_proxies(tmp_path: Path, qwen3: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    make_task(tmp_path / "tasks" / "open")
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness("InsideAgent"))
    with engine_of(qwen3) as engine:
        traces = [trace for episode in await play(env, engine, times=2) for trace in episode.traces]
    assert [(trace.ok, trace.reward, len(trace.branches)) for trace in traces] == [(True, 1.0, 1)] * 4


async def test_multi_step_task_keeps_one_proxy(tmp_path: Path, qwen3: Path) -> None:
    solved = "test -e /app/answer && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    make_task(tmp_path / "tasks" / "steps", steps={"first": solved, "second": solved}, extra=NO_NETWORK)
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness("InsideAgent"))
    with engine_of(qwen3) as engine:
        trace = await play_one(env, engine)
    assert (trace.reward, engine.calls, len(trace.branches)) == (1.0, 6, 2), trace.info["harbor"]


async def test_refused_requests_are_in_error_message(tmp_path: Path, qwen3: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    own = harness("WrongPathAgent")
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=own, retries={"max_retries": 0})
    with engine_of(qwen3) as engine:
        (episode,) = await play(env, engine)
    record = episode.traces[0].info["harbor"]
    assert (record["outcome"], record["reward"], engine.calls) == ("model_error", None, 0)
    assert "POST /v1/embeddings was refused (404)" in record["error"]["message"]


async def test_uninstallable_agent_is_agent_error_without_retry(tmp_path: Path, qwen3: Path) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    own = harness("UninstallableAgent", environment_kwargs={"image": "host"})
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=own)
    with engine_of(qwen3) as engine:
        (episode,) = await play(env, engine)
    record = episode.traces[0].info["harbor"]
    assert (record["outcome"], engine.calls) == ("agent_error", 0)
    assert "openhands-sdk could not be installed in the sandbox" in record["error"]["message"]
    assert "no such host" in record["error"]["message"]
    assert record["error"]["type"] == "AgentMissingError"
    assert len(list((tmp_path / "trials").iterdir())) == 1, "the trial was retried"


@pytest.mark.docker
@pytest.mark.usefixtures("container")
@pytest.mark.parametrize("listener", ["container", "bridge"])
async def test_agent_in_container_reaches_model(
    tmp_path: Path, qwen3: Path, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    if listener != "container":
        monkeypatch.setattr(container_sockets, "can_listen_inside", lambda: False)
    elif not container_sockets.can_listen_inside():
        pytest.skip("making a socket in a container's network needs root on the daemon's machine")
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=60)
    own = harness("ProbingAgent", environment_type="docker", environment_kwargs={})
    with engine_of(qwen3) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=own), engine)
    record = trace.info["harbor"]
    assert (record["outcome"], trace.reward, engine.calls) == ("completed", 1.0, 3), record
    assert_captured(trace, engine)
    statuses = dict(inside_agents.ProbingAgent.observed)
    del statuses["key"]
    assert statuses == {"another key": 401, "no key": 401, "another path": 404, "parent path": 404, "no request": 400}


@pytest.mark.docker
@pytest.mark.usefixtures("container")
async def test_agent_in_container_without_network_reaches_model(tmp_path: Path, qwen3: Path) -> None:
    if not container_sockets.can_listen_inside():
        pytest.skip("making a socket in a container's network needs root on the daemon's machine")
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=60)
    compose = tmp_path / "tasks" / "answer" / "environment" / "docker-compose.yaml"
    compose.write_text("services: {main: {network_mode: none}}\n")
    own = harness("InsideAgent", environment_type="docker", environment_kwargs={})
    with engine_of(qwen3) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=own), engine)
    assert (trace.info["harbor"]["outcome"], trace.reward, engine.calls) == ("completed", 1.0, 3)
    assert_captured(trace, engine)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
async def test_each_dialect_gives_one_branch_with_and_without_streaming(
    tmp_path: Path, qwen3: Path, dialect: str
) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    for stream in (False, True):
        own = harness("", agent_kwargs={"dialect": dialect, "stream": stream})
        own["agent"] = "sdk_agents:SdkAgent"
        trials = tmp_path / f"stream {stream}"
        with engine_of(qwen3) as engine:
            trace = await play_one(config(tmp_path / "tasks", trials, harness=own), engine)
        record = trace.info["harbor"]
        assert (record["outcome"], trace.reward, engine.calls) == ("completed", 1.0, 3), (stream, record)
        assert_captured(trace, engine)
        assert len([node for node in trace.nodes if node.message.role == "tool"]) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("dialect", "keep_reasoning"), [("chat", True), ("messages", True), ("responses", True), ("responses", False)]
)
async def test_returned_thinking_equals_sampled_thinking(
    tmp_path: Path, qwen3: Path, dialect: str, keep_reasoning: bool, stream: bool
) -> None:
    make_task(tmp_path / "tasks" / "answer", extra=NO_NETWORK)
    own = harness("", agent_kwargs={"dialect": dialect, "stream": stream, "keep_reasoning": keep_reasoning})
    own["agent"] = "sdk_agents:SdkAgent"
    with engine_of(qwen3, THINKS_AND_SOLVES) as engine:
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=own), engine)
    record = trace.info["harbor"]
    assert (record["outcome"], trace.reward, engine.calls) == ("completed", 1.0, 2), record
    assert_captured(trace, engine)
    thoughts = [getattr(node.message, "reasoning_content", None) for node in trace.nodes if node.sampled]
    assert thoughts == ["I think of it."] * 2
