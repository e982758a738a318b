"""The index of a run folder matches the run's files after every change."""

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from view_runs import CONFIG, eval_folder, eval_row, run_folder, trial_row, two_steps, write_rows

from harbortrainer.cli import main
from harbortrainer.errors import UserError
from harbortrainer.view.index import NAME, VERSION
from harbortrainer.view.queries import IndexedRun, TrialFilter
from harbortrainer.view.run_folders import open_store, reader_for


def query_all(store) -> list[object]:
    """Return the results of all queries."""
    trials = store.find(TrialFilter())
    parts = [store.outcomes(), store.training_counts(), store.seconds(), store.cells("train"), store.cells("eval")]
    return [trials, *parts, store.choices(), store.metrics(), [store.rewards("train", step) for step in range(4)]]


def trial_names(store) -> list[str]:
    return [line.trial for line in store.find(TrialFilter())[0]][::-1]


def query_rebuilt(folder: Path) -> list[object]:
    """Return the results of all queries on a rebuilt index."""
    (folder / NAME).unlink(missing_ok=True)
    return query_all(open_store(folder))


def append(file: Path, text: str) -> None:
    with file.open("a") as lines:
        lines.write(text)


def test_reopening_reads_no_line_twice(tmp_path, monkeypatch) -> None:
    folder = two_steps(tmp_path / "run")
    before = query_all(open_store(folder))
    monkeypatch.setattr("harbortrainer.view.index.parse_line", lambda *line: pytest.fail("a line was read twice"))
    assert query_all(open_store(folder)) == before


def test_incremental_index_equals_rebuilt_index(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [], summary=False)
    store = open_store(folder)
    stamps = [store.refresh()]
    for step in (1, 2):
        write_rows(folder / f"rollouts/step_{step}.jsonl", [trial_row(f"t{step}{n}", step=step) for n in range(3)])
        append(folder / "metrics.jsonl", json.dumps({"step": step, "loss": 0.5}) + "\n")
        write_rows(folder / f"rollouts/eval_step_{step}.jsonl", [eval_row(f"e{step}", step=step)])
        stamps.append(store.refresh())
    assert len(set(stamps)) == 3 and store.refresh() == stamps[-1], "the stamp changes only with the run"
    assert query_all(store) == query_rebuilt(folder)
    assert trial_names(store) == ["t10", "t11", "t12", "e1", "t20", "t21", "t22", "e2"]


def test_incomplete_last_line_is_indexed_when_complete(tmp_path) -> None:
    folder = eval_folder(tmp_path / "e", [trial_row("a", attempt=0), trial_row("b", attempt=1)])
    file, line = folder / "trials.jsonl", json.dumps(trial_row("c", attempt=2)) + "\n"
    append(file, line[:40])
    store = open_store(folder)
    assert trial_names(store) == ["a", "b"]
    append(file, line[40:])
    store.refresh()
    assert trial_names(store) == ["a", "b", "c"] and query_all(store) == query_rebuilt(folder)


def test_resume_drops_rows_of_removed_steps(tmp_path) -> None:
    folder = run_folder(
        tmp_path / "run",
        [trial_row("a", step=1), trial_row("b", step=2), trial_row("c", step=3)],
        metrics=[{"step": step, "loss": 1.0} for step in (1, 2, 3)],
    )
    store = open_store(folder)
    for step in (2, 3):
        (folder / f"rollouts/step_{step}.jsonl").unlink()
    shutil.move(folder / "metrics.jsonl", folder / "old")
    write_rows(folder / "metrics.jsonl", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}])
    write_rows(folder / "rollouts/step_2.jsonl", [trial_row("d", step=2)])
    store.refresh()
    assert trial_names(store) == ["a", "d"] and [row["loss"] for row in store.metrics()] == [1.0, 2.0]
    assert query_all(store) == query_rebuilt(folder)


def test_replaced_file_is_indexed_again(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a"), trial_row("b")])
    store = open_store(folder)
    write_rows(folder / "rollouts/step_1.jsonl", [trial_row("x"), trial_row("y"), trial_row("z")])
    store.refresh()
    assert trial_names(store) == ["x", "y", "z"]


@pytest.mark.parametrize("intact_bytes", [0, 10, 100, 5000, 20_000])
def test_broken_index_is_rebuilt(tmp_path, intact_bytes: int) -> None:
    folder = two_steps(tmp_path / "run")
    expected = query_all(open_store(folder))
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:intact_bytes] + os.urandom(max(0, len(content) - intact_bytes)))
    assert query_all(open_store(folder)) == expected


def test_index_broken_while_open_is_rebuilt(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    store = open_store(folder)
    expected = query_all(store)
    (folder / NAME).write_bytes(os.urandom((folder / NAME).stat().st_size))
    write_rows(folder / "rollouts/step_3.jsonl", [])
    store.refresh()
    assert query_all(store) == expected


def test_index_of_other_version_is_rebuilt(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    expected = query_all(open_store(folder))
    other = sqlite3.connect(folder / NAME)
    other.executescript(f"DELETE FROM trials; PRAGMA user_version = {VERSION + 1}")
    other.close()
    assert query_all(open_store(folder)) == expected


def test_index_is_in_memory_if_folder_is_not_writable(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    (folder / NAME).mkdir()
    assert trial_names(open_store(folder))[0] == "held0__v0"


def test_two_readers_share_one_index(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    first, second = (IndexedRun(folder, reader_for(folder)) for _ in range(2))
    for step, store, other in ((4, first, second), (5, second, first)):
        write_rows(folder / f"rollouts/step_{step}.jsonl", [trial_row(f"new{step}", step=step)])
        stamp = store.refresh()
        assert other.refresh() == stamp
        assert query_all(first) == query_all(second) and trial_names(first)[-1] == f"new{step}"


def test_row_of_other_release_gives_one_line_error_and_keeps_index(tmp_path, capsys) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a")])
    store = open_store(folder)
    row = trial_row("b", step=2)
    del row["outcome"]
    write_rows(folder / "rollouts/step_2.jsonl", [trial_row("c", step=2), row])
    with pytest.raises(
        UserError,
        match=r"step_2.jsonl: the line at byte \d+: has no field 'outcome', so another release",
    ):
        store.refresh()
    assert trial_names(store) == ["a"]
    assert main(["view", str(folder), "--export", str(tmp_path / "x.html")]) == 2
    message = capsys.readouterr().err.strip()
    assert "another release" in message and "\n" not in message and not (tmp_path / "x.html").exists()


def test_last_line_of_a_trial_is_used(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a", reward=0.0), trial_row("a", reward=1.0)])
    (line,), total = open_store(folder).find(TrialFilter())
    assert (line.reward, total) == (1.0, 1)


def test_filters_find_matching_trials(tmp_path) -> None:
    rows = [trial_row(f"t{n}", reward=None if n == 3 else n / 4, advantage=None if n == 2 else 0.1) for n in range(5)]
    rows[2]["not_trained"] = "too old"
    store = open_store(run_folder(tmp_path / "run", rows))
    for query, expected in (
        (TrialFilter(reward="none"), ["t3"]),
        (TrialFilter(reward="0.25..0.5"), ["t2", "t1"]),
        (TrialFilter(trained="too old"), ["t2"]),
        (TrialFilter(trained="no"), ["t2"]),
        (TrialFilter(sort="reward"), ["t0", "t1", "t2", "t4", "t3"]),
        (TrialFilter(sort="-reward"), ["t4", "t2", "t1", "t0", "t3"]),
        (TrialFilter(sort="task"), ["t0", "t1", "t2", "t3", "t4"]),
        (TrialFilter(task="' OR 1 --"), []),
    ):
        assert [line.trial for line in store.find(query)[0]] == expected, query
        assert store.find(query)[1] == len(expected)


def test_folder_with_only_a_config_has_no_trials(tmp_path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text(CONFIG)
    assert open_store(tmp_path).find(TrialFilter()) == ([], 0)
