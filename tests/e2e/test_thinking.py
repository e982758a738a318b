"""An agent executes only the model's answer, not commands in its thinking, with or without a reasoning parser."""

import json
from pathlib import Path

import pytest
from fakes import DONE, keys, make_task
from plugin_runs import config, play
from scripted_engine import ScriptedEngine, by_turn

pytestmark = pytest.mark.e2e

DRAFT = keys("touch /app/draft", duration=1.0)
ANSWER = keys("mkdir -p /app && touch /app/answer", duration=1.0)
REPLIES = {
    "complete think tags": f"<think>\nfirst {DRAFT}\nno, rather\n</think>\n\n{ANSWER}",
    "think tag opened by the template": f"first {DRAFT}\nno, rather\n</think>\n\n{ANSWER}",
}


@pytest.mark.parametrize("parses", [True, False], ids=["reasoning parser", "no reasoning parser"])
@pytest.mark.parametrize("mode", ["training", "evaluation", "rollout_details"])
async def test_commands_in_thinking_are_not_executed(
    tmp_path: Path, tokenizer_dir: Path, mode: str, parses: bool
) -> None:
    make_task(tmp_path / "tasks" / "answer")
    for form, reply in REPLIES.items():
        if form != "complete think tags" and (parses or mode == "training"):
            continue  # the scripted engine's reasoning parser needs both tags
        trials = tmp_path / f"trials of {form}"
        with ScriptedEngine(tokenizer_dir, by_turn([reply, DONE, DONE]), splits_reasoning=parses) as engine:
            direct = {"capture": mode, "vllm_base_url": f"{engine.url}/v1"} if mode == "rollout_details" else {}
            env = config(tmp_path / "tasks", trials, harness=direct)
            (episode,) = await play(env, engine, evaluates=mode == "evaluation")
        assert not episode.errors, episode.errors
        (trace,) = episode.traces
        assert trace.reward == 1.0, "the command of the answer was executed"
        (trajectory,) = trials.rglob("trajectory.json")
        steps = json.loads(trajectory.read_text())["steps"]
        calls = [call["arguments"] for step in steps for call in step.get("tool_calls") or ()]
        assert [call["keystrokes"] for call in calls if "keystrokes" in call] == [
            "mkdir -p /app && touch /app/answer\n"
        ]
        assert "touch /app/draft" in trajectory.read_text(), "the trajectory has the thinking"
        sampled = [token for sample in engine.samples for token in sample.token_ids]
        if mode != "evaluation":
            trained = [t for n in trace.nodes if n.sampled for t, m in zip(n.token_ids, n.mask, strict=True) if m]
            assert trained == sampled
