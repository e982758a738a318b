"""An agent acts on a model's answer, never on a draft in its thinking, however the server tells the two apart."""

import json
from pathlib import Path

import pytest
from fakes import DONE, keys, make_task
from plugin_runs import config, play
from scripted_engine import ScriptedEngine, by_turn

pytestmark = pytest.mark.e2e

DRAFT = keys("touch /app/draft", duration=1.0)
ANSWER = keys("mkdir -p /app && touch /app/answer", duration=1.0)
FORMS = {
    "whole": f"<think>\nfirst {DRAFT}\nno, rather\n</think>\n\n{ANSWER}",
    "opened by the template": f"first {DRAFT}\nno, rather\n</think>\n\n{ANSWER}",
}


@pytest.mark.parametrize("splits", [True, False], ids=["reasoning parser", "no reasoning parser"])
@pytest.mark.parametrize("way", ["training", "evaluation", "rollout_details"])
async def test_no_command_is_read_out_of_thinking(tmp_path: Path, tokenizer_dir: Path, way: str, splits: bool) -> None:
    make_task(tmp_path / "tasks" / "answer")
    for form, first in FORMS.items():
        if form != "whole" and (splits or way == "training"):
            continue  # the scripted engine's own parser knows the whole form only
        trials = tmp_path / f"trials of {form}"
        with ScriptedEngine(tokenizer_dir, by_turn([first, DONE, DONE]), splits=splits) as engine:
            direct = {"capture": way, "vllm_base_url": f"{engine.url}/v1"} if way == "rollout_details" else {}
            env = config(tmp_path / "tasks", trials, harness=direct)
            (episode,) = await play(env, engine, evaluates=way == "evaluation")
        assert not episode.errors, episode.errors
        (trace,) = episode.traces
        assert trace.reward == 1.0, "the answer was acted on"
        (trajectory,) = trials.rglob("trajectory.json")
        steps = json.loads(trajectory.read_text())["steps"]
        calls = [call["arguments"] for step in steps for call in step.get("tool_calls") or ()]
        assert [call["keystrokes"] for call in calls if "keystrokes" in call] == [
            "mkdir -p /app && touch /app/answer\n"
        ]
        assert "touch /app/draft" in trajectory.read_text(), "the thinking is on record"
        sampled = [token for sample in engine.samples for token in sample.token_ids]
        if way != "evaluation":
            kept = [t for n in trace.nodes if n.sampled for t, m in zip(n.token_ids, n.mask, strict=True) if m]
            assert kept == sampled, "the tokens are as they were sampled"
