"""The plain agent in real trials through the plugin: commands, turns, limits, and every sampled token captured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import make_task
from plugin_runs import config, play_one
from scripted_engine import Answer, ScriptedEngine, by_turn, save_tokenizer
from verifiers.v1.trace import Trace

from harbortrainer.runs.trace_transcript import as_list

pytestmark = pytest.mark.e2e

SOLVE = "mkdir -p /app && touch /app/answer"


async def play(
    tmp_path: Path, tokenizer: Path, answers: Sequence[Answer | str], *, max_turns: int | None = None, **harness: Any
) -> tuple[Trace, ScriptedEngine]:
    """Play the task in `tmp_path`, whose verifier wants the file that `SOLVE` makes."""
    with ScriptedEngine(tokenizer, by_turn(answers)) as engine:
        if harness.get("capture") == "rollout_details":
            harness["vllm_base_url"] = f"{engine.url}/v1"
        limits = {} if max_turns is None else {"max_turns": max_turns}
        env = config(tmp_path / "tasks", tmp_path / "trials", harness={"agent": "plain", **harness}, **limits)
        trace = await play_one(env | {"agent": env["agent"] | {"retries": {"max_retries": 0}}}, engine)
    return trace, engine


@pytest.fixture(autouse=True)
def task(tmp_path: Path) -> Path:
    return make_task(tmp_path / "tasks" / "answer")


def record(trace: Trace) -> tuple[object, ...]:
    harbor = trace.info["harbor"]
    return harbor["outcome"], harbor["turns"], trace.reward


@pytest.mark.parametrize("capture", ["interception", "rollout_details"])
async def test_one_answer_is_run_graded_and_captured(tmp_path: Path, tokenizer_dir: Path, capture: str) -> None:
    trace, engine = await play(tmp_path, tokenizer_dir, [f"```\n{SOLVE}\n```"], capture=capture)
    assert record(trace) == ("completed", 1, 1.0), trace.errors
    (branch,), (sample,) = trace.branches, engine.samples
    assert as_list(branch.token_ids) == sample.prompt_ids + sample.token_ids
    assert [t for t, own in zip(branch.token_ids, branch.sampled_mask, strict=True) if own] == sample.token_ids
    assert [p for p in as_list(branch.logprobs) if p] == pytest.approx([p for p in sample.logprobs if p])
    assert "one shell command" in engine.tokenizer.decode(sample.prompt_ids)


async def test_output_is_the_next_prompt_until_exit(tmp_path: Path, tokenizer_dir: Path) -> None:
    answers = ["echo out; echo err >&2", "true", SOLVE, "exit", "rm /app/answer"]
    trace, engine = await play(tmp_path, tokenizer_dir, answers, max_turns=9)
    assert record(trace) == ("completed", 4, 1.0), trace.errors
    last = engine.tokenizer.decode(engine.samples[-1].prompt_ids)
    assert "answer with exit" in last and "out\nerr" in last and "(no output, exit code 0)" in last
    assert len(trace.branches) == 1


@pytest.mark.parametrize(
    ("answers", "max_turns", "expected"),
    [
        (["true"], 2, ("turn_limit", 2, 0.0)),
        (["no command:\n".replace("no command:", "")], 5, ("completed", 1, 0.0)),
        ([Answer(f"{SOLVE}\nThis makes", cut=True)], 5, ("output_limit", 1, 1.0)),
        ([Answer(SOLVE, cut=True)], 5, ("output_limit", 1, 0.0)),
        (["kill -9 $$", SOLVE], 2, ("turn_limit", 2, 1.0)),
        (["echo \0", SOLVE], 2, ("turn_limit", 2, 1.0)),
    ],
)
async def test_endings(tmp_path: Path, tokenizer_dir: Path, answers: list, max_turns: int, expected: tuple) -> None:
    trace, _ = await play(tmp_path, tokenizer_dir, answers, max_turns=max_turns)
    assert record(trace) == expected, trace.errors


async def test_providers_own_timeout_is_the_commands(tmp_path: Path, tokenizer_dir: Path) -> None:
    harness = {"agent_kwargs": {"command_timeout_s": 1}, "environment_type": "e2e_environments:OwnTimeouts"}
    trace, _ = await play(tmp_path, tokenizer_dir, ["sleep 60", SOLVE], max_turns=2, **harness)
    assert record(trace) == ("turn_limit", 2, 1.0), trace.errors


async def test_command_that_does_not_end_is_stopped(tmp_path: Path, tokenizer_dir: Path, environment_type: str) -> None:
    harness = {"agent_kwargs": {"command_timeout_s": 1}, "environment_type": environment_type}
    trace, engine = await play(tmp_path, tokenizer_dir, ["cat /dev/zero >/dev/null", SOLVE], max_turns=2, **harness)
    assert record(trace) == ("turn_limit", 2, 1.0), trace.errors
    assert "longer than 1 s" in engine.tokenizer.decode(engine.samples[-1].prompt_ids)


@pytest.mark.parametrize("parses", [True, False], ids=["reasoning parser", "no reasoning parser"])
@pytest.mark.parametrize("capture", ["interception", "rollout_details"])
async def test_thinking_is_not_run_and_stays_in_the_history(tmp_path: Path, capture: str, parses: bool) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", thinking=True)
    answers = [f"<think>\ntouch /app/draft\n</think>\n\n{command}" for command in ("true", SOLVE)]
    with ScriptedEngine(tokenizer, by_turn(answers), splits_reasoning=parses) as engine:
        direct = {"capture": capture, "vllm_base_url": f"{engine.url}/v1"} if capture == "rollout_details" else {}
        harness = {"agent": "plain", **direct}
        trace = await play_one(config(tmp_path / "tasks", tmp_path / "trials", harness=harness, max_turns=2), engine)
    assert record(trace) == ("turn_limit", 2, 1.0), trace.errors
    assert len(trace.branches) == 1
