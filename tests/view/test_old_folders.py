"""Run and evaluation folders of an older release can be viewed, resumed and exported.

The lines below were written by release 8d39064, before `TrialRow` became the only schema. Do not edit them.
"""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from eval_folders import eval_spec
from eval_folders import row as eval_row

from harbortrainer.cli import main
from harbortrainer.evaluation.eval_folder import EvalFolder
from harbortrainer.runs.checkpoints import Progress, rewind
from harbortrainer.runs.durable import line_of
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.summary import summarize
from harbortrainer.runs.transcript import Transcript
from harbortrainer.runs.transcript_files import TranscriptWriter
from harbortrainer.runs.trial_row import UNDECIDED, TrialRow, read_rows, write_rows
from harbortrainer.view.overview import run_seconds
from harbortrainer.view.queries import TrialFilter
from harbortrainer.view.run_folders import open_store

TRANSCRIPT = (
    '{"format":1,"trial":"sort__a1","messages":[{"role":"user","text":"sort it","token_ids":[1,2]},'
    '{"role":"assistant",'
    '"text":"ls","parent":0,"sampled":true,"token_ids":[9,4,5],"spans":[1,2],"logprobs":[-0.5,-1.5],'
    '"prompt_len":3,'
    '"sampled_len":2,"version":0,"finish":"stop"}],"verifier_output":"1 passed"}\n'
)
TRANSCRIPT_GZIP = gzip.compress(TRANSCRIPT.encode(), mtime=0)
TRAINED_ROW = (
    '{"step": 1, "kind": "train", "group": "g1", "advantage": 0.5, "not_trained": null, "source": "own", '
    '"task": "sort", '
    '"task_key": "k", "trial": "sort__a1", "outcome": "completed", "reward": 1.0, '
    '"rewards": {"reward": 1.0, "tests": 0.5}, '
    '"turns": 2, "branches": 1, "tokens": {"input": 9, "output": 4, "total": 13}, "truncated": false, '
    '"cut": {"samples": 0, '
    '"tokens": 0}, "timings": {"environment_setup": 0.5, "agent_setup": 0.25, "agent_execution": 4.0, '
    '"model": 3.0, '
    '"verifier": 1.5, "total": 6.5}, "version": 0, "steps": [{"name": "one", "outcome": "completed", '
    '"rewards": '
    f'{{"reward": 1.0}}, "turns": 2}}], "error": null, "transcript": [0, {len(TRANSCRIPT_GZIP)}]}}\n'
)
FAILED_ROW = (
    '{"step": 1, "kind": "train", "group": "g1", "advantage": null, "not_trained": "failed", '
    '"source": "own", "task": "sort", '
    '"task_key": "k", "trial": "sort__a2", "outcome": "sandbox_error", "reward": null, "rewards": null, '
    '"turns": 0, '
    '"branches": 0, "tokens": {"input": 0, "output": 0, "total": 0}, "truncated": false, '
    '"cut": {"samples": 0, "tokens": 0}, '
    '"timings": {}, "version": null, "steps": [], "error": "SandboxError: gone", "transcript": null}\n'
)
HELD_OUT_ROW = (
    '{"step": 0, "kind": "eval", "source": "own", "task": "count", "task_key": "h", "trial": "count__v0", '
    '"outcome": "completed", "reward": 0.0, "rewards": {"reward": 0.0}, "turns": 2, "branches": 1, '
    '"tokens": {"input": 9, "output": 4, "total": 13}, "truncated": true, "cut": {"samples": 0, "tokens": 0}, '
    '"timings": {"total": 6.5}, "version": 0, "steps": [], "error": null, "transcript": null}\n'
)
PENDING_ROW = (
    '{"step": null, "kind": "train", "group": "g2", "advantage": null, "not_trained": null, '
    '"source": "own", "task": "sort", '
    '"task_key": "k", "trial": "sort__b1", "outcome": "completed", "reward": 1.0, '
    '"rewards": {"reward": 1.0}, "turns": 1, '
    '"branches": 1, "tokens": {"input": 9, "output": 4, "total": 13}, "truncated": false, '
    '"cut": {"samples": 0, "tokens": 0}, '
    '"timings": {"total": 2.0}, "version": 0, "steps": [], "error": null, "transcript": [0, 0]}\n'
)
EVALUATION_ROWS = (
    '{"task": "sort", "task_key": "key-sort", "attempt": 0, "trial": "sort__a1", "outcome": "completed", '
    '"reward": 1.0, '
    '"rewards": {"reward": 1.0}, "turns": 1, "prompt_tokens": 9, "sampled_tokens": 4, '
    '"timings": {"total": 2.0}, '
    f'"seconds": 2.5, "error": null, "transcript": [0, {len(TRANSCRIPT_GZIP)}]}}\n'
    '{"task": "sort", "task_key": "key-sort", "attempt": 1, "trial": "", "outcome": "sandbox_error", '
    '"reward": null, '
    '"rewards": null, "turns": 0, "prompt_tokens": 0, "sampled_tokens": 0, "timings": {}, '
    '"seconds": 0.0, "error": "gone", '
    '"transcript": null}\n'
)
PRIME_RL_EPISODE = (
    '{"id": "e1", "ok": true, "env": {"id": "harbor_env", "name": null}, "task": {"type": "T", '
    '"key": "k", "data": {"name": '
    '"sort"}}, "group": {"id": "g1"}, "run": {"type": "train", "id": "r", "work": {"type": "train", '
    '"step": 1, "policy": '
    '{"start": 3, "end": 3}}}, "errors": [], "traces": [{"id": "t1", '
    '"nodes": [{"message": {"role": "user", "content": '
    '"sort it"}, "parent": null, "token_ids": [1, 2], "mask": [false, false], "logprobs": []}, '
    '{"message": {"role": '
    '"assistant", "content": "ls"}, "parent": 0, "sampled": true, "token_ids": [9, 4, 5], '
    '"mask": [false, true, true], '
    '"logprobs": [-0.5, -1.5], "advantages": [0.5, 0.5]}], "calls": [{"node": 1, '
    '"finish_reason": "stop", "time": {"start": '
    '1.0, "end": 2.0}}], "info": {"harbor": {"outcome": "completed", "task": "sort", "task_key": "k", '
    '"trial_name": '
    '"sort__a1", "reward": 1.0, "rewards": {"reward": 1.0}, "timings": {"environment_setup": null, '
    '"total": 5.0}, "steps": '
    '[{"name": "one", "outcome": "completed", "rewards": {"reward": 1.0}, "turns": 1}]}}, '
    '"errors": []}]}\n'
)
CONFIG = 'max_steps = 3\n[model]\nname = "org/policy"\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "old"
    for name in ("rollouts", "transcripts", "trials"):
        (folder / name).mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "rollouts/step_1.jsonl").write_text(TRAINED_ROW + FAILED_ROW)
    (folder / "rollouts/eval_step_0.jsonl").write_text(HELD_OUT_ROW)
    (folder / "transcripts/step_1.jsonl.gz").write_bytes(TRANSCRIPT_GZIP)
    (folder / "transcripts/pending.jsonl").write_text(PENDING_ROW)
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "eval/mean_reward": 0.0, "eval/n": 1}\n{"step": 1, "loss": 0.5}\n'
    )
    (folder / "summary.json").write_text('{"status": "interrupted", "wall_s": 61.0, "model": "policy"}')
    return folder


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    folder = tmp_path / "old-eval"
    folder.mkdir()
    (folder / "evaluation.json").write_text(eval_spec(["sort"]).model_dump_json())
    (folder / "trials.jsonl").write_text(EVALUATION_ROWS)
    (folder / "transcripts.jsonl.gz").write_bytes(TRANSCRIPT_GZIP)
    return folder


@pytest.fixture
def prime_rl(tmp_path: Path) -> Path:
    folder = tmp_path / "old-prime-rl"
    for subset in ("all", "effective"):
        file = folder / f"rollouts/step_1/train/{subset}/traces.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(PRIME_RL_EPISODE)
    (folder / "configs").mkdir()
    return folder


def test_old_run_is_shown(run: Path) -> None:
    store = open_store(run)
    rows = {row.trial: row for row in store.find(TrialFilter())[0]}
    assert rows.keys() == {"sort__a1", "sort__a2", "count__v0", "sort__b1"}
    assert [(row.kind, row.step, row.reward, row.trained, row.untrained) for row in rows.values()] == [
        ("train", None, 1.0, False, UNDECIDED),
        ("train", 1, None, False, "failed"),
        ("train", 1, 1.0, True, ""),
        ("eval", 0, 0.0, False, ""),
    ]
    detail = store.detail("sort__a1")
    assert detail is not None and detail.row == TrialRow.model_validate_json(TRAINED_ROW)
    assert (detail.row.input_tokens, detail.row.output_tokens, detail.row.wall_s, detail.row.group) == (9, 4, 6.5, "g1")
    assert [turn.answer for turn in detail.turns] == ["ls"] and detail.verifier_output == "1 passed"
    assert store.head().status == "interrupted" and store.head().model == "org/policy"


def test_old_run_is_resumed(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in (run / "rollouts").iterdir()}
    folder = RunFolder.create(run.parent, run.name, config_text=CONFIG, resume=True)
    rewind(folder, 1)
    assert {path.name: path.read_bytes() for path in folder.rollouts.iterdir()} == before
    assert not (run / "transcripts/pending.jsonl").exists(), "an unfinished trial is repeated"
    writer = TranscriptWriter(run, max_mb=1)
    new_row = TrialRow(step=2, task="sort", trial="sort__c1", outcome="completed")
    writer.add(Transcript(trial="sort__c1").packed(), new_row)
    write_rows(folder.rollouts_file(2), writer.write("step_2", [new_row]))
    summary = summarize(folder, Progress(step=2), model="policy", seed=0, status="interrupted")
    assert (summary.trials, summary.outcomes) == (4, {"completed": 3, "sandbox_error": 1})
    assert open_store(run).find(TrialFilter())[1] == 4
    folder.release()


def test_old_run_is_exported(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--sft", str(tmp_path / "good.jsonl")]) == 0
    (line,) = (tmp_path / "good.jsonl").read_text().splitlines()
    exported = json.loads(line)
    assert [message["content"] for message in exported["messages"]] == ["sort it", "ls"]
    assert (exported["trial"], exported["step"], exported["reward"]) == ("sort__a1", 1, 1.0)
    assert main(["view", str(run), "--export", str(tmp_path / "run.html")]) == 0
    assert "sort__a1" in (tmp_path / "run.html").read_text()


def test_old_evaluation_is_shown_resumed_and_compared(evaluation: Path, tmp_path: Path) -> None:
    store = open_store(evaluation)
    rows = store.find(TrialFilter(sort="step"))[0]
    assert [(row.trial, row.kind, row.step, row.output_tokens, row.wall_s) for row in rows] == [
        ("sort__a1", "eval", 0, 4, 2.0),
        ("sort__attempt-1", "eval", 1, 0, 0.0),
    ]
    detail = store.detail("sort__a1")
    assert detail is not None and [turn.answer for turn in detail.turns] == ["ls"]
    shutil.copytree(evaluation, tmp_path / "other")
    folder = EvalFolder.begin(evaluation, eval_spec(["sort"]), resume=True)
    assert folder.graded() == {("key-sort", 0)}, "the failed attempt is repeated"
    folder.add(eval_row("sort", 1, 0.0), Transcript(trial="sort__1").packed())
    assert [(row.attempt, row.reward, row.kind) for row in folder.rows()] == [(0, 1.0, "eval"), (1, 0.0, "eval")]
    folder.release()
    assert (evaluation / "trials.jsonl").read_text().startswith(EVALUATION_ROWS)
    assert main(["eval", "--compare", str(evaluation), str(tmp_path / "other")]) == 0


def test_old_prime_rl_run_is_shown_and_exported(prime_rl: Path, tmp_path: Path) -> None:
    store = open_store(prime_rl)
    (row,), total = store.find(TrialFilter())
    assert (total, row.trial, row.source, row.advantage, row.version) == (1, "sort__a1", "harbor_env", 0.5, 3)
    assert (row.trained, row.step, row.group, row.input_tokens, row.output_tokens) == (True, 1, "g1", 3, 2)
    detail = store.detail("sort__a1")
    assert (
        detail is not None and detail.row.timings == {"total": 5.0} and [turn.answer for turn in detail.turns] == ["ls"]
    )
    assert [(step.name, step.rewards) for step in detail.row.steps] == [("one", {"reward": 1.0})]
    assert main(["export", str(prime_rl), "--sft", str(tmp_path / "good.jsonl")]) == 0
    assert json.loads((tmp_path / "good.jsonl").read_text())["trial"] == "sort__a1"


@pytest.mark.parametrize("line", [TRAINED_ROW, FAILED_ROW, HELD_OUT_ROW, PENDING_ROW])
def test_old_training_row_is_written_unchanged(line: str) -> None:
    assert line_of(TrialRow.model_validate_json(line).line()) == line


def test_old_evaluation_row_keeps_its_fields(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text(EVALUATION_ROWS)
    rows = [row.line() for row in read_rows(tmp_path / "trials.jsonl")]
    assert rows == [json.loads(line) for line in EVALUATION_ROWS.splitlines()]


def test_unreadable_value_is_shown_as_its_default(run: Path) -> None:
    damaged = json.loads(TRAINED_ROW) | {"turns": "many", "reward": "high", "outcome": None, "timings": {"total": []}}
    (run / "rollouts/step_1.jsonl").write_text(json.dumps(damaged) + "\n")
    detail = open_store(run).detail("sort__a1")
    assert detail is not None
    assert (detail.row.turns, detail.row.reward, detail.row.outcome, detail.row.wall_s) == (0, None, "", None)
    assert (detail.row.group, detail.row.advantage) == ("g1", 0.5)


def test_old_step_times_are_shown() -> None:
    step = json.loads(
        '{"step":1,"time/step":10.0,"time/hand_over":2.0,"time/score_again":3.0,"time/forward_backward":5.0}'
    )
    assert sorted((part.style, part.amount) for part in run_seconds([step])) == [
        ("t-hand", 2.0),
        ("t-proof", 3.0),
        ("t-train", 5.0),
    ]


def test_old_metric_names_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in ("time/hand_over", "time/score_again", "proof/spread"))
