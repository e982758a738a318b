"""A run of Prime-RL: its file monitor's episodes, as its orchestrator writes them, are trials like any other."""

import re
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from view_runs import write_rows

from harbortrainer.view.folder_kind import open_store
from harbortrainer.view.trial_filter import TrialFilter
from harbortrainer.view.web_app import Site


def episode(trial: str, *, advantage: float | None = None, ok: bool = True, **record: object) -> dict[str, object]:
    """A line of `traces.jsonl`: what `Episode.to_record` of verifiers gives, with the record of our plugin."""
    asked = {"message": {"role": "user", "content": "sort it"}, "token_ids": [1, 2], "mask": [False, False]}
    answer: dict[str, object] = {
        "parent": 0,
        "message": {"role": "assistant", "content": "ls"},
        "sampled": True,
        "token_ids": [9, 4, 5],
        "mask": [False, True, True],
        "logprobs": [-0.5, -1.5],
        "advantages": None if advantage is None else [advantage, advantage],
    }
    harbor: dict[str, object] = {
        "outcome": "completed",
        "task": "sort",
        "task_key": "k",
        "trial_name": trial,
        "reward": 1.0,
        "rewards": {"reward": 1.0},
        "timings": {"agent_execution": 4.0, "model": 3.0, "total": 5.0},
    }
    trace = {
        "id": f"id-{trial}",
        "nodes": [asked, answer],
        "calls": [{"node": 1, "finish_reason": "stop", "time": {"start": 1.0, "end": 2.0}}],
        "info": {"harbor": harbor | record},
        "errors": [] if ok else [{"type": "SandboxError", "message": "gone"}],
    }
    policy = {"type": "train", "step": 1, "policy": {"start": 3, "end": 3}}
    return {
        "id": f"e-{trial}",
        "ok": ok,
        "env": {"id": "harbor_env"},
        "task": {"key": "k", "data": {"name": "sort"}},
        "group": {"id": "g-eval" if trial == "e" else "g1"},
        "run": {"type": "train", "id": "r", "work": policy},
        "traces": [trace],
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    run = tmp_path / "run"
    every = [
        episode("a"),
        episode("b", reward=0.0),
        episode("c"),
        episode("d", ok=False, outcome="sandbox_error", reward=None, rewards=None),
    ]
    trained = [episode("a", advantage=0.5), episode("b", advantage=-0.5, reward=0.0)]
    write_rows(run / "rollouts/step_1/train/all/traces.jsonl", every)
    write_rows(run / "rollouts/step_2/train/effective/traces.jsonl", trained)
    write_rows(run / "rollouts/step_0/eval/all/traces.jsonl", [episode("e")])
    write_rows(run / "rollouts/step_0/eval/effective/traces.jsonl", [episode("e")])
    rows = [
        {"step": 1, "time/step": 9.0, "time/pack": 1.0, "train/agg/all/agent/reward/mean": 0.5},
        {"step": 1, "time/step": 8.0, "time/wait_for_batch": 6.0, "time/forward_backward": 2.0},
    ]
    write_rows(run / "metrics.jsonl", rows)
    (run / "configs").mkdir()
    (run / "configs/rl.toml").write_text('[model]\nname = "Qwen/Qwen3-8B"\n')
    return run


def words_of(folder: Path, address: str) -> str:
    answer = TestClient(Site(open_store(folder)).app(), base_url="http://localhost").get(address)
    assert answer.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.text.split("<main>")[1])).split())


def test_what_trained_is_told_from_what_came_back(folder) -> None:
    lines, total = open_store(folder).found(TrialFilter(sort="task"))
    found = {line.trial: (line.kind, line.step, line.reward, line.trained, line.not_trained) for line in lines}
    assert total == 5
    assert found == {
        "a": ("train", 2, 1.0, True, ""),
        "b": ("train", 2, 0.0, True, ""),
        "c": ("train", 1, 1.0, False, "left out by Prime-RL"),
        "d": ("train", 1, None, False, "failed"),
        "e": ("eval", 0, 1.0, False, ""),
    }


def test_the_clock_is_the_trainers(folder) -> None:
    words = words_of(folder, "/")
    assert "run of Prime-RL of Qwen/Qwen3-8B" in words
    assert "waiting for trials 75.0 % 6.0 s" in words and "training 25.0 % 2.0 s" in words


def test_a_trial_is_shown_turn_by_turn(folder) -> None:
    words = words_of(folder, "/trial/b")
    assert "advantage of -0.5 (0 against its group's mean of 0.667)" in words
    assert "sampled by version 3" in words and "told to the model sort it" in words and "2 tokens after 3" in words
    assert "SandboxError: gone" in words_of(folder, "/trial/d")
