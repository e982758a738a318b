"""Advantages per token of an annotation, set on the nodes of a trace."""

import json
from pathlib import Path

import pytest
from prime_rl_runs import StreamRun, arrived, episode

from harbortrainer.runs.prime_rl_files import config_files, row_of_line, transcript_of_line
from harbortrainer.runs.trial_row import RowTokens, TrialRow

TOKENS = [[1, 2], [3, 4], [5], [6, 7], [8]]
PARENTS = [None, 0, 1, 0, 3]
"""Two branches, 0-1-2 and 0-3-4: their leaves are 2 and 4."""
MASKS = [[False, False], [False, True], [True], [True, True], [False]]


@pytest.fixture
def line() -> dict[str, object]:
    found = arrived(episode("a"), "train", 1)
    nodes = [
        {"parent": parent, "token_ids": ids, "mask": mask, "sampled": any(mask)}
        | {"message": {"role": "assistant" if any(mask) else "user", "content": "x"}}
        for parent, ids, mask in zip(PARENTS, TOKENS, MASKS, strict=True)
    ]
    found["traces"][0]["nodes"] = nodes
    return found


def advantages(run: StreamRun, line: dict[str, object]) -> dict[int, list[float]]:
    transcript = transcript_of_line(run.path, line)
    assert transcript is not None
    return transcript.advantages


def annotation(*branches: tuple[int, list[float | None]]) -> dict[str, object]:
    facts = {"effective": True, "ship": {"step": 1}}
    streams = [{"index": index, "advantages": values} for index, values in branches]
    return {"trace_id": "id-a", "info": facts, "branches": streams}


def test_each_branch_sets_the_tokens_of_its_path(tmp_path: Path, line: dict[str, object]) -> None:
    run = StreamRun(tmp_path)
    assert advantages(run, line) == {}
    run.annotate([annotation((0, [None, None, None, 0.1, 0.2]), (1, [None, None, 0.3, 0.4, None]))])
    assert advantages(run, line) == {3: [0.3, 0.4]}, "nodes 1 and 2 have one value each"
    run.annotate([annotation((1, [None, None, 0.5, 0.6, None]))])
    assert advantages(run, line) == {3: [0.5, 0.6]}, "the newest counts"


@pytest.mark.parametrize("values", [[], [None, None, 0.3], [None, None, 0.3, None, None], [None] * 5])
def test_message_without_all_values_has_none(
    tmp_path: Path, line: dict[str, object], values: list[float | None]
) -> None:
    run = StreamRun(tmp_path)
    run.annotate([annotation((1, values), (7, [0.1, 0.2]))])
    assert advantages(run, line) == {}


def test_missing_annotation_stream_is_left_out(tmp_path: Path, line: dict[str, object]) -> None:
    run = StreamRun(tmp_path)
    run.annotate([annotation((1, [None, None, 0.3, 0.4, None]))])
    (run.traces / "annotations/orch/00000.jsonl").unlink()
    assert advantages(run, line) == {}


def test_newest_config_folder_is_used(tmp_path: Path) -> None:
    for folder in ("configs", "configs/resolved", "configs/attempt_2/resolved"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "trainer.json").write_text(json.dumps({"folder": folder}))
    assert config_files(tmp_path) == {"trainer": tmp_path / "configs/resolved/trainer.json"}
    (tmp_path / "configs/latest").symlink_to("attempt_2")
    assert config_files(tmp_path) == {"trainer": tmp_path / "configs/latest/resolved/trainer.json"}


def row_in(line: dict[str, object], folder: str = "rollouts/step_1/train/all") -> TrialRow:
    found = row_of_line(line, Path(folder) / "traces.jsonl")
    assert found is not None
    return found


def test_trial_that_prime_rl_failed_is_no_completed_one() -> None:
    """Its agent made no call, so Prime-RL drops it, whatever reward the verifier gave."""
    line = episode("a", ok=False)
    line["traces"][0]["errors"] = [{"type": "EmptyTrajectory", "message": "no steps"}]
    row = row_in(line)
    assert (row.outcome, row.reward, row.untrained) == ("agent_error", None, "failed")
    assert row.error == "EmptyTrajectory: no steps"


@pytest.mark.parametrize("outcome", ["turn_limit", "completed"])
def test_trace_that_prime_rl_trained_has_its_reward(outcome: str) -> None:
    """The episode's own hook failed after the trace: Prime-RL looks at the trace only."""
    line = episode("a", advantage=0.5, outcome=outcome) | {"ok": False}
    row = row_in(line, "rollouts/step_1/train/effective")
    assert (row.outcome, row.reward, row.advantage, row.trained) == (outcome, 1.0, 0.5, True)
    assert row_in(line).untrained == "left out by Prime-RL"


def test_failed_trial_has_its_own_outcome() -> None:
    line = episode("a", ok=False, outcome="sandbox_error", reward=None)
    assert row_in(line).outcome == "sandbox_error"


def test_row_counts_branches_tokens_and_truncation(line: dict[str, object]) -> None:
    trace = line["traces"][0]  # ty: ignore[not-subscriptable]
    for stop, finish, truncated in ((None, "stop", False), ("max_turns", "stop", True), (None, "length", True)):
        trace |= {"stop_condition": stop, "calls": [{"node": 4, "finish_reason": finish}]}
        row = row_in(line)
        assert (row.branches, row.truncated) == (2, truncated)
    trace["calls"].append({"node": None, "error": {"type": "E", "message": ""}})
    assert row_in(line).tokens == RowTokens(input=4, output=4, total=10), "the root is in both branches"
    assert row_in(line).truncated, "a call without an answer does not count"


def test_line_with_a_missing_parent_is_no_episode(line: dict[str, object]) -> None:
    line["traces"][0]["nodes"][1]["parent"] = 9  # ty: ignore[not-subscriptable]
    assert row_of_line(line, Path("rollouts/step_1/train/all/traces.jsonl")) is None


def test_evaluation_without_token_ids_counts_the_servers_tokens(line: dict[str, object]) -> None:
    """Prime-RL's evaluations use chat completions, so their nodes have no tokens."""
    trace = line["traces"][0]  # ty: ignore[not-subscriptable]
    for node in trace["nodes"]:
        node |= {"token_ids": [], "mask": []}
    usages = {
        1: {"prompt_tokens": 39, "completion_tokens": 11},
        4: {"prompt_tokens": 1, "cached_input_tokens": 80, "completion_tokens": 2},
    }
    trace["calls"] = [{"node": node, "usage": usage} for node, usage in usages.items()]
    row = row_in(line, "rollouts/step_1/eval/all")
    assert (row.input_tokens, row.output_tokens) == (120, 13)
