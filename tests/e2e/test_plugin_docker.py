"""The plugin with real containers: an agent that cannot reach the model's endpoint."""

from pathlib import Path

import pytest
from fakes import DONE, make_task
from plugin_runs import config, play_one
from scripted_engine import ScriptedEngine, by_turn

from harbortrainer.environment.rollout_state import TrialRetriedError
from harbortrainer.environment.verifiers_compat import retries

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.usefixtures("container")]


@pytest.mark.parametrize("agent", ["RetryingAgent", "FailingAgent"])
async def test_unreachable_endpoint_is_model_error_with_address(
    tmp_path: Path, tokenizer_dir: Path, agent: str
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=6.0)
    harness = {"environment_type": "docker", "agent": f"unreachable_agents:{agent}"}
    no_retry = retries(TrialRetriedError, 0).model_dump()
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=harness, retries=no_retry)
    with ScriptedEngine(tokenizer_dir, by_turn([DONE])) as engine:
        trace = await play_one(env, engine)
    record = trace.info["harbor"]
    assert (record["outcome"], record["reward"], engine.calls) == ("model_error", None, 0), record
    assert "no model call of the agent reached http://127.0.0.1:" in record["error"]["message"]
