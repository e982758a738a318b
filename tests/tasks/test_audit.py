"""`tasks audit` finds planted defects, and reports nothing on clean tasks."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from planted_tasks import FAMILIES, KINDS, PASS_OR_FAIL, Plan, write_planted

from harbortrainer.cli import main
from harbortrainer.config.plugin import TasksetKeys
from harbortrainer.errors import UserError
from harbortrainer.tasks.audit import guesses, read_files, readable_answers, static_findings
from harbortrainer.tasks.checked_trial import CheckedTrial
from harbortrainer.tasks.passed_checks import checked_as, record_passed
from harbortrainer.tasks.task_folder import load_folder, load_task
from harbortrainer.tasks.task_selection import select_tasks
from harbortrainer.tasks.verdict import Verdict, verdict_of
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Timings

STATIC = ("solution-in-image", "tests-in-image", "expected-in-image", "answer-in-instruction")


def weak_findings(folder: Path) -> dict[str, list[str]]:
    return {
        task.name: [f.what for f in readable_answers(read_files(task)) if f.severity == "weak"]
        for task in load_folder(folder)
    }


@pytest.mark.pure
def test_finds_answers_in_image_and_instruction_without_false_alarm(tmp_path: Path) -> None:
    kinds = write_planted(tmp_path, seed=1)
    found = weak_findings(tmp_path / "tasks")
    assert len(KINDS) * 5 == sum(map(bool, kinds.values())) == sum(not kind for kind in kinds.values())
    assert {name for name in found if found[name]} == {name for name, kind in kinds.items() if kind in STATIC}
    assert found["solution-in-image-1"] == [
        "the image may have copies: solution/solve.sh (environment/app/.old/run.bak)"
    ]
    assert found["expected-in-image-0"] == ["an expected value stands as an answer in environment/Dockerfile"]


@pytest.mark.pure
@pytest.mark.parametrize(
    "test",
    [
        "assert answer == '73519'",
        'assert "73519" != answer',
        "assert total == 73519",
        "self.assertEqual(run(), 73519)",
        "EXPECTED_TOTAL = 73519",
        "[ $total == 73519 ] && true",
        '[ "$(cat /app/total.txt)" = "73519" ]',
        "grep -qx '73519' /app/total.txt",
        "echo 73519 | cmp - /app/total.txt",
    ],
)
def test_reads_the_constant_of_a_comparison(tmp_path: Path, test: str) -> None:
    plan = Plan("Add them. The answer: 73519.", {}, "true", test, "total.txt")
    plan.write(tmp_path / "task")
    files = read_files(load_task(tmp_path / "task"))
    assert files.values == ["73519"]
    assert [finding.what for finding in readable_answers(files)] == ["the instruction has the answer"]


@pytest.mark.pure
def test_instruction_that_states_the_result_is_only_a_note(tmp_path: Path) -> None:
    Plan("Write status-ready to /app/out.txt.", {}, "true", "[ $(cat out.txt) = status-ready ]", "out").write(tmp_path)
    (finding,) = readable_answers(read_files(load_task(tmp_path)))
    assert finding.severity == "note" and "stands in the instruction" in finding.what


@pytest.mark.pure
def test_unchanged_file_of_the_image_in_the_solution_is_no_leak(tmp_path: Path) -> None:
    code = "def area(width, height):\n    return width * height\n"
    Plan("Fix it.", {"shapes.py": code}, "cp -r /solution/app /", "true", "out").write(tmp_path)
    (tmp_path / "solution/app").mkdir()
    (tmp_path / "solution/app/shapes.py").write_text(code)
    assert readable_answers(read_files(load_task(tmp_path))) == []
    (tmp_path / "environment/app/shapes.py").rename(tmp_path / "environment/app/fixed.py")
    (finding,) = readable_answers(read_files(load_task(tmp_path)))
    assert finding.what == "the image may have copies: solution/app/shapes.py (environment/app/fixed.py)"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("secret", "leaks"),
    [
        ("steps/first/solution/app/shapes.py", False),
        ("tests/reference/shapes.py", False),
        ("solution/app/tests/check_shapes.py", False),
        ("tests/check_shapes.py", True),
        ("steps/first/tests/check_shapes.py", True),
    ],
)
def test_unchanged_code_of_a_reference_is_no_leak(tmp_path: Path, secret: str, *, leaks: bool) -> None:
    code = "def area(width, height):\n    return width * height\n"
    Plan("Fix it.", {Path(secret).name: code}, "true", "true", "out").write(tmp_path)
    (tmp_path / secret).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / secret).write_text(code)
    assert bool(readable_answers(read_files(load_task(tmp_path)))) == leaks


@pytest.mark.pure
@pytest.mark.parametrize(
    ("instruction", "file", "text"),
    [
        ("Add them.", "expected.csv", "total\n73519\n"),
        ("Write the total to /app/answer.txt.", "old/answer.txt", "73519\n"),
        ("Write 73519 for an unknown total.", "notes.md", "The expected value is 73519."),
        ("Compare /app/actual.csv with /app/expected.csv.", "expected.csv", "total\n73519\n"),
        ("Add them.", "samples/expected.csv", "total\n73519\n"),
        ("Add them.", "GoldenApp.swift", "let code = 73519"),
    ],
    ids=[
        "leak",
        "leak beside the output",
        "value in the instruction",
        "file in the instruction",
        "example",
        "source code",
    ],
)
def test_named_input_example_and_source_code_are_no_leak(
    tmp_path: Path, instruction: str, file: str, text: str, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "environment/app").mkdir(parents=True)
    Plan(instruction, {}, "true", "[ $total = 73519 ]", "out").write(tmp_path)
    path = tmp_path / "environment/app" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    weak = [finding.what for finding in readable_answers(read_files(load_task(tmp_path))) if finding.severity == "weak"]
    leak = [f"an expected value stands as an answer in environment/app/{file}"]
    assert weak == (leak if request.node.callspec.id.startswith("leak") else [])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("instruction", "dockerfile", "test", "leaks"),
    [
        ("Count.", "RUN echo 2 > /opt/answer_truth.txt", "open('/opt/answer_truth.txt')", True),
        ("Count.", "# RUN echo 2 > /opt/answer_truth.txt", "open('/opt/answer_truth.txt')", False),
        ("Count.", "RUN echo 2 > /opt/answer_truth.txt", "open('/tests/answer_truth.txt')", False),
        ("Write answer.txt.", "RUN touch /app/answer.txt", "open('/app/answer.txt')", False),
        ("Count.", "RUN touch /app/solution.py", "open('/app/solution.py')", False),
        ("Count.", "RUN python3 /build/make.py", "open('/opt/answer_truth.txt')", True),
        ("Count.", "", "open('/opt/answer_truth.txt')", False),
        ("Count.", "", "open('/app/answer_key.txt')", True),
    ],
    ids=[
        *("leak", "comment", "the tests' own", "the task's output", "source code"),
        *("a build script's", "an unused script's", "copied"),
    ],
)
def test_answer_of_the_image_that_the_tests_read_is_a_leak(
    tmp_path: Path, instruction: str, dockerfile: str, test: str, *, leaks: bool
) -> None:
    Plan(instruction, {}, "true", "true", "out").write(tmp_path)
    (tmp_path / "environment/Dockerfile").write_text(f"FROM debian:12-slim\n{dockerfile}\n")
    (tmp_path / "environment/make.py").write_text("open('/opt/answer_truth.txt', 'w').write(str(1 + 1))\n")
    (tmp_path / "environment/answer_key.txt").write_text("2\n")
    (tmp_path / "tests/test_count.py").write_text(f"assert int({test}.read()) == 1 + 1\n")
    weak = [finding.what for finding in readable_answers(read_files(load_task(tmp_path))) if finding.severity == "weak"]
    said = f"the tests read an answer of the image: {test.split("'")[1]}"
    assert weak == ([said] if leaks else [])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("instruction", "test", "leaks"),
    [
        ("Count.", "python3 /opt/hidden_grader.py > score.txt", True),
        ("Count.", 'reward=$(bash -e "/opt/hidden_grader.py")', True),
        ("Count.", "python3 -m pytest -q /opt/hidden_grader.py", True),
        ("Count.", "# python3 /opt/hidden_grader.py", False),
        ("Count.", "cmp /opt/hidden_grader.py count.txt", False),
        ("Count.", "python3 /tests/hidden_grader.py", False),
        ("Count.", "python3 /opt/counter.py", False),
        ("Count.", "cp /tests/own_check.py /opt; python3 /opt/own_check.py", False),
        ("Write hidden_grader.py.", "python3 /opt/hidden_grader.py", False),
    ],
    ids=[
        *("run", "by a shell", "by pytest", "comment", "compared", "the tests' own", "the program under test"),
        *("brought by the tests", "the agent's work"),
    ],
)
def test_grader_of_the_image_is_a_finding(tmp_path: Path, instruction: str, test: str, *, leaks: bool) -> None:
    Plan(instruction, {}, "true", test, "out", tests={"own_check.py": "assert True"}).write(tmp_path)
    for name in ("hidden_grader.py", "counter.py", "own_check.py"):
        (tmp_path / "environment" / name).write_text("print(1)\n")
    weak = [finding.what for finding in static_findings(read_files(load_task(tmp_path))) if finding.severity == "weak"]
    assert weak == (["the tests run a grader of the image: /opt/hidden_grader.py"] if leaks else [])
    (tmp_path / "environment/Dockerfile").unlink()
    assert static_findings(read_files(load_task(tmp_path))) == []


@pytest.mark.pure
@pytest.mark.parametrize(
    ("lines", "noted"),
    [
        ("took = time.monotonic() - start\nassert took < 3", True),
        ("took = time.monotonic() - start\nprint(took)", False),
        ("deadline = time.monotonic() + 60\nassert failures < 3", False),
    ],
    ids=["limit", "report", "deadline"],
)
def test_limit_of_a_running_time_is_a_note(tmp_path: Path, lines: str, *, noted: bool) -> None:
    Plan("Sort.", {}, "true", "true", "out", tests={"test_sort.py": f"import time\n{lines}\n"}).write(tmp_path)
    found = [(finding.severity, finding.what) for finding in static_findings(read_files(load_task(tmp_path)))]
    said = "tests/test_sort.py limits a running time, so the reward depends on the machine's load"
    assert found == ([("note", said)] if noted else [])


@pytest.mark.pure
def test_guesses_name_the_tasks_files_and_common_values_of_its_tests(tmp_path: Path) -> None:
    test = "[ $(cat /app/a/out.txt) = 42 ] || [ $(cat /app/b) = 4711 ] || [ -f /usr/bin/x ] || [ -f /tests/y ]"
    Plan("Write notes.md and '/app/it is'.", {}, "true", test, "out").write(tmp_path)
    found = guesses(read_files(load_task(tmp_path)))
    assert list(found) == ["guessed-empty", "guessed-42", "guessed-1"]
    named = re.search(r"for file in (.*?); do", found["guessed-42"])
    assert named is not None and named[1].split() == ["/app/a/out.txt", "/app/b", "/app/it", "notes.md"]


@pytest.mark.pure
def test_binary_and_linked_files_are_left_out(tmp_path: Path) -> None:
    Plan("Do it.", {"a.bin": "text"}, "true", "true", "out").write(tmp_path)
    (tmp_path / "environment/app/a.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "environment/app/link").symlink_to("../../instruction.md")
    assert [file.name for file in read_files(load_task(tmp_path)).environment] == ["environment/Dockerfile"]


def trial(agent: str, reward: float | None) -> CheckedTrial:
    return CheckedTrial(agent=agent, outcome=Outcome.completed, reward=reward, seconds=Timings())


@pytest.mark.pure
def test_mutant_counts_with_the_top_reward_only() -> None:
    fair = [trial("oracle", 1), trial("nop", 0), trial("halved-output", 0.5), trial("emptied-output", None)]
    assert verdict_of("t", "k", fair).word == "ok"
    verdict = verdict_of("t", "k", [*fair, trial("altered-output", 1)])
    assert verdict.doubts == ["the verifier accepts a spoiled solution: altered-output"] and not verdict.forged


@pytest.mark.pure
def test_audited_selects_only_tasks_without_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        FAMILIES["total"](random.Random(number)).write(tmp_path / "tasks" / f"task-{number}")
    first, second = load_folder("tasks")
    table = TasksetKeys(tasks_dir=Path("tasks"), audited=True)
    record_passed([second], checked_as("local", "keep"))
    with pytest.raises(
        UserError, match=r"none of these tasks passed the audit .*run `harbortrainer tasks audit tasks`"
    ):
        select_tasks(table)
    record_passed([first], checked_as("local", "keep", audited=True))
    assert [task.name for task in select_tasks(table).tasks] == [first.name]


@pytest.mark.e2e
@pytest.mark.process
def test_audit_command_runs_guesses_and_mutants_and_finds_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    clean = FAMILIES["total"](random.Random(3))
    clean.write(tmp_path / "tasks/clean")
    replace(clean, test=f"if [ -f /app/total.txt ]; {PASS_OR_FAIL}").write(tmp_path / "tasks/exists")
    agree = 'if [ "$(cat a.txt)" -eq "$(cat b.txt)" ]; ' + PASS_OR_FAIL
    Plan("Add to a.txt and b.txt.", {"n": "7"}, "tee a.txt < n > b.txt", agree, "a.txt").write(tmp_path / "tasks/agree")
    replace(clean, solve="true").write(tmp_path / "tasks/unsolved")
    clean.write(tmp_path / "known/original")
    options = ["--repeats", "1", "--cheats", "none", "--parallel", "2", "--json", "audit.json"]
    assert main(["tasks", "audit", "tasks", *options]) == 1
    report = {row["task"]: Verdict.model_validate(row) for row in json.loads(Path("audit.json").read_text())["tasks"]}
    assert report["clean"].word == "ok", report["clean"].findings
    rewards = {trial.agent: trial.reward for trial in report["clean"].trials}
    mutants = dict.fromkeys(("emptied-output", "halved-output", "altered-output", "halved-solution"), 0)
    assert rewards == {"oracle": 1, "nop": 0, "guessed-empty": 0, "guessed-1": 0, **mutants}
    assert [trial.agent for trial in report["unsolved"].trials] == ["oracle", "nop"]
    assert report["unsolved"].note == "no guesses or mutants were run, since the solution never passed"
    assert report["exists"].forged == {"guessed-empty": 1, "guessed-1": 1}
    assert report["agree"].forged == {"guessed-1": 1}
    assert "the verifier accepts a spoiled solution: emptied-output" in report["exists"].doubts[1]
    table = TasksetKeys(tasks_dir=Path("tasks"), audited=True)
    assert [task.name for task in select_tasks(table).tasks] == ["clean"]
    capsys.readouterr()
    assert main(["tasks", "audit", "tasks", *options, "--resume", "--benchmark", "known"]) == 1
    assert "4 tasks were checked before" in capsys.readouterr().out
    report = {row["task"]: Verdict.model_validate(row) for row in json.loads(Path("audit.json").read_text())["tasks"]}
    assert report["clean"].doubts == ["a copy of original of known (the same content)"]


@pytest.mark.e2e
@pytest.mark.process
def test_mutant_that_leaves_the_result_intact_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    box = "printf '+--+\\n+--+\\n'"
    signs = Plan(
        "Draw a box.", {"a": ""}, f"{box} > box.txt", f"if {box} | cmp -s - box.txt; {PASS_OR_FAIL}", "box.txt"
    )
    signs.write(tmp_path / "tasks/signs")
    checks_itself = replace(signs, solve=f"{signs.solve}\n\n# now look at it\ncat box.txt\nls -l\necho done")
    checks_itself.write(tmp_path / "tasks/checks-itself")
    assert main(["tasks", "audit", "tasks", "--repeats", "1", "--cheats", "none", "--json", "audit.json"]) == 0
    for row in json.loads(Path("audit.json").read_text())["tasks"]:
        verdict = Verdict.model_validate(row)
        rewards = {trial.agent: trial.reward for trial in verdict.trials}
        assert verdict.word == "ok", verdict.findings
        assert rewards["altered-output"] is None and rewards["halved-solution"] == 0


@pytest.mark.e2e
@pytest.mark.process
def test_spoiled_files_of_a_running_service_are_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = "while :; do touch /app/beat; sleep 0.05; done"
    solve = f"echo '{loop}' > service.sh\n(setsid bash -c \"$(cat service.sh)\" > /dev/null 2>&1 < /dev/null &)"
    test = f"rm -f /app/beat; sleep 0.5; if [ -e /app/beat ]; {PASS_OR_FAIL}"
    Plan("Start a service that touches the beat.", {"n": ""}, solve, test, "").write(tmp_path / "tasks/service")
    assert main(["tasks", "audit", "tasks", "--repeats", "1", "--cheats", "none", "--json", "audit.json"]) == 0
    (verdict,) = (Verdict.model_validate(row) for row in json.loads(Path("audit.json").read_text())["tasks"])
    assert verdict.word == "ok", verdict.findings
    assert {trial.reward for trial in verdict.trials if trial.agent.endswith("-output")} == {None}
