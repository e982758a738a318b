"""The plugin with real containers: an agent inside one that cannot reach the model's endpoint."""

from pathlib import Path

import pytest
from fakes import DONE, make_task
from plugin_runs import config, play_one
from scripted_engine import ScriptedEngine, by_turn

from harbortrainer.environment.attempts import TrialRetriedError
from harbortrainer.environment.verifiers_side import retries

pytestmark = [pytest.mark.docker, pytest.mark.e2e, pytest.mark.usefixtures("container")]


@pytest.mark.parametrize("agent", ["TriesForEver", "GivesUp"])
async def test_an_agent_that_cannot_reach_the_endpoint_is_a_model_error_that_names_it(
    tmp_path: Path, tokenizer_dir: Path, agent: str
) -> None:
    make_task(tmp_path / "tasks" / "answer", agent_timeout_s=6.0)
    own = {"environment_type": "docker", "agent": f"unreachable_agents:{agent}"}
    once = retries(TrialRetriedError, 0).model_dump()
    env = config(tmp_path / "tasks", tmp_path / "trials", harness=own, retries=once)
    with ScriptedEngine(tokenizer_dir, by_turn([DONE])) as engine:
        trace = await play_one(env, engine)
    record = trace.info["harbor"]
    assert (record["outcome"], record["reward"], engine.calls) == ("model_error", None, 0), record
    assert "ever reached http://127.0.0.1:" in record["error"]["message"]
