"""Export of good trials as an SFT dataset for TRL and Prime-RL.

Ungraded trials, held-out trials, and conversations with unsampled answers are left out.
"""

import json
from pathlib import Path

import pytest
from finished_run import write_finished_run

from harbortrainer.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_finished_run(tmp_path / "run", tmp_path / "model")


def test_dataset_has_conversations_of_good_trials(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data" / "good.jsonl"
    assert main(["export", str(run), "--sft", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["trial"], [message["content"] for message in row["messages"]]) for row in rows] == [
        ("solved", ["do it", "ls", "a b", "done"]),
        ("two-steps", ["step one", "one"]),
        ("two-steps", ["step two", "two"]),
        ("rewritten", ["x", "y"]),
        ("cut-off", ["go", "went"]),
    ]
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "ls", "reasoning_content": "hm"}
    assert {key: rows[0][key] for key in ("task", "source", "step", "reward")} == {
        "task": "solved",
        "source": "own",
        "step": 1,
        "reward": 1.0,
    }
    output = capfd.readouterr().out
    assert "5 conversations from 4 trials of 4 tasks" in output
    for reason in (
        "1 with a reward under 1",
        "1 without a reward",
        "1 whose agent changed tools",
        "1 conversations with an answer that the policy did not give",
        "1 conversations with an answer that was cut at its length",
    ):
        assert reason in output


def test_min_reward_selects_trials(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--sft", str(tmp_path / "good.jsonl"), "--min-reward", "0.5"]) == 0
    assert '"trial": "half"' in (tmp_path / "good.jsonl").read_text()


def test_failed_dataset_export_leaves_no_file(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "good.jsonl"
    for arguments, error in (
        ([str(tmp_path / "none"), "--sft", str(file)], "this run has no trials"),
        ([str(run), "--sft", str(file), "--min-reward", "2"], "no good trials in this run: 8 with a reward under 2"),
        ([str(run), "--sft", str(file), "--merged"], "--sft writes a dataset, not a model"),
        ([str(run), "--sft", str(run / "config.toml")], "already exists"),
    ):
        assert main(["export", *arguments]) == 2
        line = capfd.readouterr().err
        assert error in line and line.count("\n") == 1, line
    assert not [path.name for path in tmp_path.iterdir() if "good" in path.name]


def test_prime_rl_run_is_exported_as_dataset(tmp_path: Path) -> None:
    episodes = tmp_path / "prime" / "rollouts" / "step_3" / "train" / "all" / "traces.jsonl"
    episodes.parent.mkdir(parents=True)
    nodes = [
        {"message": {"role": "user", "content": "do it"}, "token_ids": [1, 2], "mask": [False, False]},
        {"message": {"role": "assistant", "content": "done"}, "parent": 0, "sampled": True}
        | {"token_ids": [3, 4], "mask": [False, True], "logprobs": [-0.1]},
    ]
    for ok, reward in ((True, 1.0), (False, 1.0), (True, 0.0)):
        record = {"trial_name": f"t-{ok}-{reward}", "task": "own", "outcome": "completed", "reward": reward}
        trace = {"id": "a", "nodes": nodes, "info": {"harbor": record}}
        with episodes.open("a") as file:
            file.write(json.dumps({"id": "e", "ok": ok, "env": {"id": "harbor_env"}, "traces": [trace]}) + "\n")
    with episodes.open("a") as file:
        file.write('{"id": "being wri')
    assert main(["export", str(tmp_path / "prime"), "--sft", str(tmp_path / "good.jsonl")]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "good.jsonl").read_text().splitlines()]
    assert (row["trial"], row["step"], len(row["messages"])) == ("t-True-1.0", 3, 2)
