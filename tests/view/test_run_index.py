"""The index beside a run says what the run's files say, whatever happened to it or to them."""

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from view_runs import CONFIG, eval_folder, eval_row, run_folder, trial_row, two_steps, write_rows

from harbortrainer.cli import main as command_line
from harbortrainer.errors import UserError
from harbortrainer.view.folder_kind import kind_of, open_store
from harbortrainer.view.index_file import NAME, VERSION
from harbortrainer.view.index_queries import IndexedRun
from harbortrainer.view.trial_filter import TrialFilter


def told(store) -> list[object]:
    """Everything that the store says of a run."""
    lines = store.found(TrialFilter())
    parts = [store.outcomes(), store.fates(), store.seconds(), store.cells("train"), store.cells("eval")]
    return [lines, *parts, store.choices(), store.metrics(), [store.rewards("train", step) for step in range(4)]]


def trials(store) -> list[str]:
    return [line.trial for line in store.found(TrialFilter())[0]][::-1]


def fresh(folder: Path) -> list[object]:
    """What an index says that was made from the files alone."""
    (folder / NAME).unlink(missing_ok=True)
    return told(open_store(folder))


def append(file: Path, text: str) -> None:
    with file.open("a") as end:
        end.write(text)


def test_what_is_opened_again_was_not_read_again(tmp_path, monkeypatch) -> None:
    folder = two_steps(tmp_path / "run")
    before = told(open_store(folder))
    monkeypatch.setattr("harbortrainer.view.run_index.parsed_line", lambda *line: pytest.fail("a line was read twice"))
    assert told(open_store(folder)) == before


def test_an_index_that_grew_with_the_run_is_the_one_made_afterwards(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [], summary=False)
    store = open_store(folder)
    stamps = [store.refresh()]
    for step in (1, 2):
        write_rows(folder / f"rollouts/step_{step}.jsonl", [trial_row(f"t{step}{n}", step=step) for n in range(3)])
        append(folder / "metrics.jsonl", json.dumps({"step": step, "loss": 0.5}) + "\n")
        write_rows(folder / f"rollouts/eval_step_{step}.jsonl", [eval_row(f"e{step}", step=step)])
        stamps.append(store.refresh())
    assert len(set(stamps)) == 3 and store.refresh() == stamps[-1], "the stamp changes with the run, and only then"
    assert told(store) == fresh(folder)
    assert trials(store) == ["t10", "t11", "t12", "e1", "t20", "t21", "t22", "e2"]


def test_a_line_that_a_kill_tore_is_not_there_until_it_is_whole(tmp_path) -> None:
    folder = eval_folder(tmp_path / "e", [trial_row("a", attempt=0), trial_row("b", attempt=1)])
    file, whole = folder / "trials.jsonl", json.dumps(trial_row("c", attempt=2)) + "\n"
    append(file, whole[:40])
    store = open_store(folder)
    assert trials(store) == ["a", "b"]
    append(file, whole[40:])
    store.refresh()
    assert trials(store) == ["a", "b", "c"] and told(store) == fresh(folder)


def test_after_a_resume_the_forgotten_steps_are_forgotten_here_too(tmp_path) -> None:
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
    assert trials(store) == ["a", "d"] and [row["loss"] for row in store.metrics()] == [1.0, 2.0]
    assert told(store) == fresh(folder)


def test_a_file_that_was_written_anew_in_its_place_is_read_anew(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a"), trial_row("b")])
    store = open_store(folder)
    write_rows(folder / "rollouts/step_1.jsonl", [trial_row("x"), trial_row("y"), trial_row("z")])
    store.refresh()
    assert trials(store) == ["x", "y", "z"]


@pytest.mark.parametrize("size", [0, 10, 100, 5000, 20_000])
def test_a_broken_index_is_made_anew(tmp_path, size: int) -> None:
    folder = two_steps(tmp_path / "run")
    right = told(open_store(folder))
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:size] + os.urandom(max(0, len(content) - size)))
    assert told(open_store(folder)) == right


def test_an_index_that_breaks_while_it_is_looked_at_is_made_anew(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    store = open_store(folder)
    right = told(store)
    (folder / NAME).write_bytes(os.urandom((folder / NAME).stat().st_size))
    write_rows(folder / "rollouts/step_3.jsonl", [])
    store.refresh()
    assert told(store) == right


def test_an_index_of_another_release_is_made_anew(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    right = told(open_store(folder))
    other = sqlite3.connect(folder / NAME)
    other.executescript(f"DELETE FROM trials; PRAGMA user_version = {VERSION + 1}")
    other.close()
    assert told(open_store(folder)) == right


def test_where_nothing_can_be_written_the_index_is_in_memory(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    (folder / NAME).mkdir()
    assert trials(open_store(folder))[0] == "held0__v0"


def test_two_look_at_one_run_at_a_time(tmp_path) -> None:
    folder = two_steps(tmp_path / "run")
    one, two = (IndexedRun(folder, kind_of(folder)) for _ in range(2))
    for step, store, other in ((4, one, two), (5, two, one)):
        write_rows(folder / f"rollouts/step_{step}.jsonl", [trial_row(f"late{step}", step=step)])
        stamp = store.refresh()
        assert other.refresh() == stamp
        assert told(one) == told(two) and trials(one)[-1] == f"late{step}"


def test_a_line_of_another_release_is_one_line_and_leaves_the_index_as_it_was(tmp_path, capsys) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a")])
    store = open_store(folder)
    row = trial_row("b", step=2)
    del row["outcome"]
    write_rows(folder / "rollouts/step_2.jsonl", [trial_row("c", step=2), row])
    with pytest.raises(UserError, match=r"step_2.jsonl: the line at byte \d+: has no 'outcome': another release"):
        store.refresh()
    assert trials(store) == ["a"]
    assert command_line(["view", str(folder), "--export", str(tmp_path / "x.html")]) == 2
    said = capsys.readouterr().err.strip()
    assert "another release" in said and "\n" not in said and not (tmp_path / "x.html").exists()


def test_the_newer_of_two_lines_about_one_trial_counts(tmp_path) -> None:
    folder = run_folder(tmp_path / "run", [trial_row("a", reward=0.0), trial_row("a", reward=1.0)])
    (line,), total = open_store(folder).found(TrialFilter())
    assert (line.reward, total) == (1.0, 1)


def test_a_filter_of_anything_finds_what_it_says(tmp_path) -> None:
    rows = [trial_row(f"t{n}", reward=None if n == 3 else n / 4, advantage=None if n == 2 else 0.1) for n in range(5)]
    rows[2]["not_trained"] = "too old"
    store = open_store(run_folder(tmp_path / "run", rows))
    for query, found in (
        (TrialFilter(reward="none"), ["t3"]),
        (TrialFilter(reward="0.25..0.5"), ["t2", "t1"]),
        (TrialFilter(trained="too old"), ["t2"]),
        (TrialFilter(trained="no"), ["t2"]),
        (TrialFilter(sort="reward"), ["t0", "t1", "t2", "t4", "t3"]),
        (TrialFilter(sort="-reward"), ["t4", "t2", "t1", "t0", "t3"]),
        (TrialFilter(sort="task"), ["t0", "t1", "t2", "t3", "t4"]),
        (TrialFilter(task="' OR 1 --"), []),
    ):
        assert [line.trial for line in store.found(query)[0]] == found, query
        assert store.found(query)[1] == len(found)


def test_the_config_alone_is_a_run_of_no_trials(tmp_path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").write_text(CONFIG)
    assert open_store(tmp_path).found(TrialFilter()) == ([], 0)
