"""Every command that takes tasks has the same subset options, and the same rule for tasks that cannot be used."""

import json
from pathlib import Path

import pytest
from eval_folders import eval_spec
from task_sets import make_task

from harbortrainer.cli import main
from harbortrainer.errors import UserError
from harbortrainer.evaluation.measuring import load_tasks
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.tasks.task_subset import TaskSubset

pytestmark = pytest.mark.process

NAMES = [f"t{number}" for number in range(7)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_disjoint_and_complete(count: int) -> None:
    shards = [TaskSubset(shard=f"{index}/{count}").pick(NAMES) for index in range(1, count + 1)]
    assert sorted(name for shard in shards for name in shard) == NAMES
    assert {len(shard) for shard in shards} <= {7 // count, 7 // count + 1}


def test_limit_is_applied_to_the_shard() -> None:
    assert TaskSubset(shard="2/3", limit=1).pick(NAMES) == ["t1"]
    assert TaskSubset(limit=2).pick(NAMES) == ["t0", "t1"]


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2"])
def test_refuses_a_shard_that_does_not_exist(shard: str) -> None:
    with pytest.raises(UserError, match="is not a shard; write I/N with I from 1 to N"):
        TaskSubset(shard=shard).pick(NAMES)


def test_refuses_an_empty_shard() -> None:
    with pytest.raises(UserError, match="the shard 8/8 of 7 tasks is empty; use at most 7 shards"):
        TaskSubset(shard="8/8").pick(NAMES)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two usable tasks, and one of each kind that cannot be used."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tasks"
    make_task(folder / "good", "Sort the lines.")
    make_task(folder / "other", "Count the words.")
    make_task(folder / "repeated", "Sort the lines.")
    make_task(folder / "named").joinpath("task.toml").write_text('[task]\nname = "alone"\n')
    make_task(folder / "mode").joinpath("task.toml").write_text('[environment]\nnetwork_mode = "strange"\n')
    (make_task(folder / "silent") / "instruction.md").unlink()
    return folder


COMMANDS = {
    "list": ["tasks", "list", "tasks"],
    "split": ["tasks", "split", "tasks"],
    "fetch": ["tasks", "fetch", "tasks"],
    "overlap": ["tasks", "overlap", "distinct", "tasks"],
}
BAD = {
    "mode": "tasks/mode/task.toml: environment.network_mode: ",
    "named": "task.name: 'alone' is not ORGANIZATION/NAME, which Harbor requires",
    "repeated": "good and repeated are the same task",
    "silent": "no instruction.md",
}


@pytest.mark.parametrize("command", ["list", "split", "check"])
def test_skip_bad_needs_a_usable_task(command: str, tasks: Path) -> None:
    assert main(["tasks", command, "tasks", "--include", "silent", "--skip-bad"]) == 1


def test_evaluation_does_not_name_bad_tasks_outside_its_subset(tasks: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_task(tasks / "odd[1]", "A name that is no pattern.")
    chosen = {task.name: task.key for task in load_folder(tasks, ["good", "odd*"])}
    (make_task(tasks / "odd1") / "instruction.md").unlink()
    spec = eval_spec([]).model_copy(update={"tasks_dir": str(tasks), "tasks": chosen})
    assert [str(task.key) for task in load_tasks(spec)] == [chosen["good"], chosen["odd[1]"]]
    assert "left out" not in caplog.text


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_tasks_are_lines_and_the_others_go_on(
    command: str, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tasks.parent / "distinct" / "task", "Make a plot.").joinpath("tests/test.sh").write_text("false")
    assert main(COMMANDS[command]) == 1
    bad = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("BAD  ")}
    assert bad.keys() == BAD.keys()
    assert all(what in bad[name] for name, what in BAD.items())
    assert main([*COMMANDS[command], "--skip-bad"]) == 0
    excluded = [word for name in BAD for word in ("--exclude", name)]
    capsys.readouterr()
    assert main([*COMMANDS[command], *excluded]) == 0
    assert "BAD" not in capsys.readouterr().out


def test_list_reads_only_the_subset(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*options: str) -> list[str]:
        main(["tasks", "list", "tasks", "--json", *options])
        return [task["name"] for task in json.loads(capsys.readouterr().out)["tasks"]]

    assert listed("--include", "*o*", "--exclude", "mode") == ["good", "other"]
    assert listed("--include", "*o*", "--exclude", "mode", "--shard", "2/2") == ["other"]
    assert listed("--include", "*o*", "--exclude", "mode", "--limit", "1") == ["good"]
    assert main(["tasks", "list", "tasks", "--include", "good", "--include", "other"]) == 0


def test_fetch_copies_the_subset(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "fetch", "tasks", "--to", "copy", "--exclude", "silent", "--limit", "2"]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 tasks in copy" in out and 'tasks_dir = "copy"' in out
    assert sorted(path.name for path in Path("copy").iterdir()) == ["good", "tasks.lock.json"]


def test_a_set_without_a_usable_task_names_each(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "fetch", "tasks", "--include", "silent", "--include", "named"]) == 2
    error = capsys.readouterr().err
    assert "alone" in error and "no instruction.md" in error and "0 of 2 tasks load" in error
    assert main(["tasks", "list", "tasks", "--include", "silent"]) == 1
    assert "BAD  silent" in capsys.readouterr().out


def test_eval_leaves_out_what_it_cannot_run(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trials themselves are left out; `tests/e2e` runs them."""
    from harbortrainer.commands import evaluate

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    judged = make_task(tasks / "judged", "Write an essay.")
    (judged / "task.toml").write_text('[verifier.env]\nJUDGE = "${OPENAI_API_KEY}"\n')
    make_task(tasks / "gpu", "Train.").joinpath("task.toml").write_text("[environment]\ngpus = 1\n")
    evaluated: list[str] = []

    def run(order, candidate, spec, out, tasks, **more) -> int:
        evaluated.extend(spec.tasks)
        return 0

    monkeypatch.setattr(evaluate, "run_trials", run)
    words = ["eval", "tasks", "--agent", "nop", "--environment", "local", "--environment-kwarg", "image=host"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert evaluated == ["good", "other"]
    assert all(f"BAD  {name}  " in out for name in [*BAD, "judged", "gpu"]) and "pass `--trust judged`" in out
    assert main([*words, "--skip-bad", "--shard", "1/2"]) == 0
