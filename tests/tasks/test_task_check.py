"""`tasks check` finds exactly the faulty tasks of a folder."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_environments import LosesItsFolder
from patience import wait_until

from harbortrainer.cli import main
from harbortrainer.doctor import docker_daemon, task_checks
from harbortrainer.harbor_compat.task_lint import has_lint
from harbortrainer.runs import display
from harbortrainer.tasks.cheats import CHEATS
from harbortrainer.tasks.checked_trial import CheckedTrial
from harbortrainer.tasks.passed_checks import (
    CHECKED_FILE,
    audited_keys,
    needs_no_service,
    passed_environments,
    passed_keys,
)
from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.tasks.verdict import Verdict, bad, verdict_of
from harbortrainer.tasks.verdict_log import VERDICTS_FILE, VerdictLog
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Timings

pytestmark = pytest.mark.process

RIGHT = """
if [ -f /app/done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
[ -f /app/done ] || echo /app/done is missing
"""
SEPARATE = 'artifacts = ["/app/out"]\n[verifier]\nenvironment_mode = "separate"\n'
TPU = 'tpu = { type = "v6e", topology = "2x2" }\n'
SOLVES_OUT = "touch /app/out/done"
BY_COMPARING = (
    "echo right | cmp -s - /app/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
)
PASSES_EVERY_SECOND_START = (
    "if [ -f /app/done ]; then echo $(($(cat /start-number) % 2)); else echo 0; fi > /logs/verifier/reward.txt"
)


def write_task(
    folder: Path, name: str, *, test: str = RIGHT, solution: str | None = "touch /app/done", toml: str = ""
) -> None:
    task = folder / name
    for part in ("environment", "tests"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text(f'version = "1.0"\n{toml}')
    (task / "instruction.md").write_text(f"Make the file /app/done. ({name})")
    (task / "environment/Dockerfile").write_text("FROM debian:12-slim\nWORKDIR /app\n")
    (task / "tests/test.sh").write_text(test)
    if solution is not None:
        (task / "solution").mkdir()
        (task / "solution/solve.sh").write_text(solution)


def passed_in(kind: str) -> set[str]:
    """Return the keys of the tasks that passed in one type of environment."""
    return {key for key, kinds in passed_environments().items() if kind in kinds}


@pytest.fixture
def faulty_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tasks"
    write_task(folder, "good")
    write_task(folder, "no-solution", solution=None)
    write_task(folder, "passes-everybody", test="echo 1 > /logs/verifier/reward.txt")
    write_task(folder, "oracle-fails", solution="true")
    write_task(folder, "gives-up", test="echo pytest: command not found")
    write_task(folder, "cannot-build")
    (folder / "cannot-build/environment/Dockerfile").write_text("FROM debian:12-slim\nRUN false\n")
    return folder


@pytest.mark.e2e
def test_check_stops_when_kept_folder_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LosesItsFolder, "started", started := [])
    monkeypatch.setattr(LosesItsFolder, "ended", ended := [])
    for name in "abc":
        write_task(tmp_path / "tasks", name)
    write_task(tmp_path / "tasks", "d", solution="sleep 3000")
    options = ["--parallel", "3", "--repeats", "1", "--cheats", "none", "--keep", "kept", "--json", "found.json"]
    where = ["--environment", "e2e_environments:LosesItsFolder", "--environment-kwarg", "image=host"]
    code = main(["tasks", "check", "tasks", *options, *where])
    out, err = capfd.readouterr()
    stopped = "stopped: the --keep folder kept was removed or moved during the check; "
    assert (code, err) == (1, f"{stopped}run the same command with --resume to continue\n")
    assert [line for line in out.splitlines() if not line.startswith("lint ")] == ["ok   a"]
    assert len(passed_keys()) == 1
    assert [task["task"] for task in json.loads(Path("found.json").read_text())["tasks"]] == ["a"]
    assert sorted(started) == sorted(ended) == ["a", "a", "b", "c", "d"]


@pytest.mark.e2e
async def test_cancelled_check_starts_no_more_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LosesItsFolder, "started", started := [])
    monkeypatch.setattr(LosesItsFolder, "ended", ended := [])
    write_task(tmp_path, "c")
    where = "e2e_environments:LosesItsFolder"
    checking = asyncio.create_task(check_tasks(load_folder(tmp_path), environment_type=where))
    await asyncio.to_thread(wait_until, lambda: ended)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert started == ended == ["c"]


@pytest.mark.e2e
async def test_check_finds_every_faulty_task(faulty_tasks: Path, tmp_path: Path) -> None:
    verdicts = await check_tasks(load_folder(faulty_tasks), concurrency=4, keep=tmp_path / "kept")
    by_name = {verdict.task: verdict for verdict in verdicts}
    assert list(by_name) == sorted(by_name)
    assert {name for name, verdict in by_name.items() if not verdict.problem} == {"good", "no-solution"}
    assert by_name["no-solution"].note == "no solution, so the oracle was not run"
    assert "the verifier accepts any result" in by_name["passes-everybody"].problem
    assert "the oracle's reward is 0" in by_name["oracle-fails"].problem
    assert "(the solution ended with exit code 0 and no output)" in by_name["oracle-fails"].problem
    assert "/app/done is missing" in by_name["oracle-fails"].problem
    assert "sandbox_error" in by_name["cannot-build"].problem
    assert "verifier_error" in by_name["gives-up"].problem
    assert "pytest: command not found" in by_name["gives-up"].problem
    assert list((tmp_path / "kept").glob("*/result.json"))


@pytest.mark.e2e
async def test_install_without_network_is_bad_only_if_verifier_lacks_it(tmp_path: Path) -> None:
    closed = '[environment]\nnetwork_mode = "no-network"\n'
    install = "pip install pytest > /dev/null 2>&1 || true\n"
    write_task(tmp_path, "has-it", test=install + RIGHT, solution="exit 3", toml=closed)
    write_task(tmp_path, "lacks-it", test=f"{install}no-such-pytest\necho 0 > /logs/verifier/reward.txt", toml=closed)
    has_it, lacks_it = await check_tasks(load_folder(tmp_path), environment_kwargs={"image": "host"})
    assert [(f.severity, f.category) for f in has_it.findings] == [("bad", "solution"), ("note", "verifier")]
    assert [(f.severity, f.category) for f in lacks_it.findings] == [("bad", "verifier"), ("bad", "solution")]
    for finding in (has_it.findings[1], lacks_it.findings[0]):
        assert "installs software (tests/test.sh: pip install)" in finding.what


@pytest.mark.e2e
async def test_bad_task_verdict_names_crlf_scripts(tmp_path: Path) -> None:
    for name in ("solves", "grades", "passes"):
        write_task(tmp_path, name)
        for script in ("solution/solve.sh", "tests/test.sh"):
            path = tmp_path / name / script
            path.write_text(f"#!/bin/bash\n{path.read_text()}")
    for script in ("solves/solution/solve.sh", "grades/tests/test.sh", "passes/environment/unused.sh"):
        path = tmp_path / script
        lines = path.read_text() if path.exists() else "#!/bin/bash\n"
        path.write_text(lines, newline="\r\n")
    grades, passes, solves = await check_tasks(load_folder(tmp_path), environment_kwargs={"image": "host"})
    remedy = (
        "Windows line endings, which Linux shells cannot run, in {}: remove them (sed -i 's/\\r$//' FILE); the oracle"
    )
    assert "ended as verifier_error" in grades.problem and grades.problem.startswith(remedy.format("tests/test.sh"))
    assert "oracle's reward is 0" in solves.problem and solves.problem.startswith(remedy.format("solution/solve.sh"))
    assert {verdict.findings[0].category for verdict in (grades, solves)} == {"task"}
    (tmp_path / "passes/environment/Dockerfile").write_text("FROM debian:12-slim\nRUN false\n")
    (unbuilt,) = await check_tasks(load_folder(tmp_path, ["passes"]))
    assert [finding.category for finding in unbuilt.findings] == ["build", "task"], "its scripts never ran"
    assert passes.problem == passes.note == ""


@pytest.mark.e2e
async def test_random_verifier_is_flaky(tmp_path: Path) -> None:
    write_task(tmp_path, "flaky", test=PASSES_EVERY_SECOND_START)
    write_task(tmp_path, "good")
    flaky, good = await check_tasks(
        load_folder(tmp_path), repeats=3, concurrency=1, environment_type="e2e_environments:NumbersItsStarts"
    )
    assert flaky.problem.startswith("flaky: oracle got ")
    assert len({trial.reward for trial in flaky.of("oracle")}) == 2
    assert good.problem == "" and [trial.reward for trial in good.of("oracle")] == [1, 1, 1]


@pytest.mark.e2e
async def test_names_successful_cheats_and_separate_verifier_resists(tmp_path: Path) -> None:
    write_task(tmp_path, "calls-cmp", test=BY_COMPARING, solution="echo right > /app/done")
    write_task(tmp_path, "calls-python", test="python3 /tests/check.py > /logs/verifier/reward.txt", solution=None)
    (tmp_path / "calls-python/tests/check.py").write_text("print(0)")
    needs = "RUN which python3 || (apt-get update && apt-get install -y --no-install-recommends python3)\n"
    (tmp_path / "calls-python/environment/Dockerfile").write_text(f"FROM debian:12-slim\n{needs}")
    write_task(tmp_path, "out-of-reach", toml=SEPARATE, test=RIGHT.replace("/app/", "/app/out/"), solution=SOLVES_OUT)
    dockerfile = "FROM debian:12-slim\nWORKDIR /app\n"
    (tmp_path / "out-of-reach/environment/Dockerfile").write_text(f"{dockerfile}RUN mkdir /app/out\n")
    (tmp_path / "out-of-reach/tests/Dockerfile").write_text(f"{dockerfile}COPY . /tests\n")
    tool, python, out_of_reach = await check_tasks(load_folder(tmp_path), cheats=list(CHEATS), concurrency=3)
    assert [verdict.problem for verdict in (tool, python, out_of_reach)] == [""] * 3
    assert tool.forged["replaced-tools"] == 1 and python.forged["python-hooks"] == 1
    assert out_of_reach.forged == {} and {trial.agent for trial in out_of_reach.trials} >= set(CHEATS)
    assert out_of_reach.seconds.verifier and out_of_reach.seconds.agent_execution


async def test_refuses_privileged_compose_service_unless_task_is_trusted(tmp_path: Path) -> None:
    write_task(tmp_path, "open", toml=f"[environment]\n{TPU}")
    (tmp_path / "open/environment/docker-compose.yaml").write_text("services: {main: {privileged: true}}")
    (verdict,) = await check_tasks(load_folder(tmp_path), environment_type="docker")
    assert verdict.problem.startswith("refused, since it can access this machine: main is privileged; ")
    assert "pass `--trust open`" in verdict.problem and verdict.trials == []
    (verdict,) = await check_tasks(load_folder(tmp_path), environment_type="docker", trusted=["op*"])
    assert verdict.problem.startswith("cannot run in docker: [environment] tpu")
    assert verdict.note == "sandbox not isolated: main is privileged"


@pytest.mark.parametrize(("kind", "advised"), [("local", True), ("docker", False)])
async def test_unsupported_task_gets_the_advice_of_eval(tmp_path: Path, kind: str, advised: bool) -> None:
    write_task(tmp_path, "tpu", toml=f"[environment]\n{TPU}")
    tasks = load_folder(tmp_path)
    (verdict,) = await check_tasks(tasks, environment_type=kind)
    assert ("--environment auto, which uses docker" in verdict.problem) is advised
    error = task_checks.refusal(tasks[0], kind, {}, "--environment", ())
    assert error and verdict.problem.endswith(error.do)


@pytest.mark.parametrize("kind", ["local", "docker"])
async def test_missing_test_script_is_the_tasks_fault(tmp_path: Path, kind: str) -> None:
    write_task(tmp_path, "untested")
    (tmp_path / "untested/tests/test.sh").unlink()
    (verdict,) = await check_tasks(load_folder(tmp_path), environment_type=kind)
    assert verdict.problem.endswith("contain tests/test.sh.; correct the files, or exclude the task by name")
    assert [one.category for one in verdict.findings] == ["task"] and verdict.trials == []


async def test_warns_about_shared_ports(tmp_path: Path) -> None:
    write_task(tmp_path, "serves", toml="[environment]\ngpus = 1\n")
    (tmp_path / "serves/instruction.md").write_text("Serve it at localhost:8080.")
    (verdict,) = await check_tasks(load_folder(tmp_path), environment_kwargs={"network": "host"})
    assert verdict.note == "concurrent trials share this machine's ports: 8080"


async def test_warns_about_ignored_key(tmp_path: Path) -> None:
    write_task(tmp_path, "typo", toml='[environment]\ngpus = 1\n[verifier]\nenviroment_mode = "separate"\n')
    (verdict,) = await check_tasks(load_folder(tmp_path))
    assert verdict.note == "Harbor ignores these task.toml keys: verifier.enviroment_mode"


@pytest.mark.e2e
async def test_found_solution_cheat_finds_solution_in_image(tmp_path: Path) -> None:
    copied = {"beside": "COPY copy /srv/copy\n", "where-the-oracle-has-it": "COPY copy /solution\n", "nowhere": ""}
    for name, copy in copied.items():
        write_task(tmp_path, name)
        dockerfile = f"FROM debian:12-slim\nWORKDIR /app\n{copy}"
        (tmp_path / name / "environment/Dockerfile").write_text(dockerfile)
        for folder in ("solution", "environment/copy"):
            (tmp_path / name / folder).mkdir(exist_ok=True)
            (tmp_path / name / folder / "solve.sh").write_text("bash $(dirname $0)/help.sh")
            (tmp_path / name / folder / "help.sh").write_text("touch done")
    verdicts = await check_tasks(load_folder(tmp_path), cheats=["found-solution"])
    assert {verdict.task: (verdict.problem, verdict.forged) for verdict in verdicts} == {
        "beside": ("", {"found-solution": 1}),
        "where-the-oracle-has-it": ("", {"found-solution": 1}),
        "nowhere": ("", {}),
    }


@pytest.mark.e2e
def test_check_with_killed_leftovers_shows_which_task_needs_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    solutions = {"file": "touch done", "service": "touch done; setsid sleep 777 > /dev/null 2>&1 < /dev/null &"}
    for name, solution in solutions.items():
        write_task(tmp_path / "tasks", name)
        (tmp_path / "tasks" / name / "solution/solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    test = tmp_path / "tasks/service/tests/test.sh"
    test.write_text("pgrep -f 'sleep 777' > /dev/null && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n")
    options = ["--repeats", "1", "--cheats", "none"]
    assert main(["tasks", "check", "tasks", *options]) == 0
    assert main(["tasks", "check", "tasks", *options, "--leftovers", "kill"]) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 tasks are fit to train on" in printed and "BAD  service" in printed
    assert {task.name: needs_no_service(task) for task in load_folder(Path("tasks"))} == {
        "file": True,
        "service": False,
    }
    assert main(["tasks", "check", "tasks", *options, "--leftovers", "kill", "--environment", "modal"]) == 2


@pytest.mark.e2e
def test_skip_bad_skips_tasks_that_cannot_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks", "good")
    write_task(tmp_path / "tasks", "needs-gpu", toml="[environment]\ngpus = 1\n")
    words = ["tasks", "check", "tasks", "--environment-kwarg", "image=host", "--repeats", "1", "--cheats", "none"]
    assert main(words) == 1
    assert main([*words, "--skip-bad"]) == 0
    write_task(tmp_path / "tasks", "oracle-fails", solution="true")
    assert main([*words, "--skip-bad"]) == 1


@pytest.mark.e2e
def test_check_command_continues_after_bad_task_and_resumes(
    faulty_tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "PLAIN_EVERY_S", 0.0)
    (faulty_tasks / "unreadable").mkdir()
    (faulty_tasks / "unreadable/task.toml").write_text("version = ")
    quick = ["--repeats", "1", "--cheats", "forged-reward", "--parallel", "4"]
    reports = ["--json", "reports/check.json", "--markdown", "reports/check.md"]
    assert main(["tasks", "check", str(faulty_tasks), *quick, *reports]) == 1
    printed = capsys.readouterr().out
    assert "BAD" in printed.splitlines()[0] and "unreadable/task.toml" in printed.splitlines()[0]
    summary = "2 of 7 tasks are fit to train on (not fit: verifier 2, build 1, solution 1, task 1)"
    assert summary in printed and "checking tasks: 7/7" in printed
    assert ("\nlint good  task.toml [shared-verifier] Verifier shares" in printed) is has_lint()
    assert set(json.loads(CHECKED_FILE.read_text())) == passed_in("local") != passed_in("docker")
    report = json.loads(Path("reports/check.json").read_text())
    verdicts = {task["task"]: Verdict.model_validate(task) for task in report["tasks"]}
    assert report["fit"] == 2 and report["total"] == len(verdicts) == 7
    assert report["not_fit"] == {"verifier": 2, "task": 1, "build": 1, "solution": 1}
    categories = {name: [(f.severity, f.category) for f in verdict.findings] for name, verdict in verdicts.items()}
    assert categories["oracle-fails"] == [("bad", "solution")] and categories["unreadable"] == [("bad", "task")]
    assert categories["no-solution"] == [("note", "solution")] and categories["good"] == []
    assert [trial.agent for trial in verdicts["good"].trials] == ["oracle", "nop", "forged-reward"]
    assert all(trial.seconds.total for trial in verdicts["good"].trials)
    table = Path("reports/check.md").read_text().splitlines()
    assert any(row.startswith("| good | ok | 1 | 0 | ") for row in table) and len(table) == 6 + 7
    assert main(["tasks", "check", str(faulty_tasks), *quick, "--resume"]) == 1
    again = capsys.readouterr().out
    assert "6 tasks were checked before" in again and "unreadable" in again
    assert not any(f"  {name}" in again for name in ("good", "gives-up", "cannot-build"))
    assert summary in again and len(VERDICTS_FILE.read_text().splitlines()) == 6
    (faulty_tasks / "good/instruction.md").write_text("Make /app/done, please.")
    options = ["--include", "good", "--include", "gives-up", "--resume"]
    assert main(["tasks", "check", str(faulty_tasks), *quick, *options]) == 1
    again = capsys.readouterr().out
    assert "1 tasks were checked before" in again and "ok   good" in again, "a changed task is checked again"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--cheats", "bribery"], "there is no cheat 'bribery'"),
        (["--json", "/"], "--json /: cannot be written"),
    ],
)
def test_check_command_validates_options_before_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    write_task(tmp_path, "good")
    assert main(["tasks", "check", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def trial(agent: str, reward: float | None, outcome: Outcome = Outcome.completed) -> CheckedTrial:
    failure = "" if outcome is Outcome.completed else f"ended as {outcome}"
    return CheckedTrial(agent=agent, outcome=outcome, reward=reward, seconds=Timings(verifier=1.0), failure=failure)


def test_random_verifier_is_flaky_and_not_forged() -> None:
    coin = verdict_of("t", "k", [trial("oracle", 1), trial("nop", 0), trial("forged-reward", 1), trial("nop", 1)])
    assert coin.problem == "flaky: nop got 0, 1" and coin.forged == {}
    some = verdict_of("t", "k", [trial("oracle", 1), trial("nop", 0.2), trial("written-tests", 0.2), trial("x", 0.3)])
    assert some.problem == "" and some.forged == {"x": 0.3}, "nop's reward is not a forgery"


@pytest.mark.parametrize("low", [0, 0.5])
def test_reward_below_that_of_doing_nothing_is_flaky_or_wrong(low: float) -> None:
    verdict = verdict_of("t", "k", [trial("oracle", low), trial("nop", 1)])
    assert f"doing nothing gets reward 1, the solution {low:g}: the verifier is flaky or wrong" in verdict.problem
    assert "any result" not in verdict.problem
    verdict = verdict_of("t", "k", [trial("oracle", low), trial("nop", low + 0.25)])
    assert f"doing nothing gets reward {low + 0.25:g}, the solution {low:g}: the verifier" in verdict.problem
    equal = verdict_of("t", "k", [trial("oracle", low), trial("nop", low)])
    assert "doing nothing" not in equal.problem


def test_failed_repeat_is_flaky_and_failed_cheat_is_no_problem() -> None:
    lost = trial("oracle", None, Outcome.verifier_error)
    assert "flaky: oracle got 1, no reward" in verdict_of("t", "k", [trial("oracle", 1), lost, trial("nop", 0)]).problem
    broke = trial("removed-tests", None, Outcome.verifier_error)
    sound = verdict_of("t", "k", [trial("oracle", 1), trial("nop", 0), broke])
    assert sound.problem == "" and sound.forged == {}


@pytest.mark.parametrize(
    ("rewards", "reward", "key", "words"),
    [
        ({"reward": 1.0, "grader_failed": 1.0}, 1.0, None, []),
        ({"accuracy": 1.0}, 1.0, None, []),
        ({"score": 1.0, "style": 1.0}, 1.0, None, ["score, style and no 'reward'", "--reward-key"]),
        ({"score": 1.0, "chars": 5000.0}, 2500.5, None, ["a reward is 2500.5, above 1", "chars: by name a counter"]),
        ({"score": 1.0, "chars": 5000.0}, 1.0, "score", []),
        ({"overall": 1.0, "grader_failed": 1.0}, 1.0, None, ["grader_failed: by name a counter or a failure flag"]),
    ],
)
def test_doubts_name_numbers_that_may_be_no_reward(rewards, reward, key, words) -> None:
    oracle = trial("oracle", reward).model_copy(update={"rewards": rewards, "reward_key": key})
    verdict = verdict_of("t", "", [oracle, trial("nop", 0.0)])
    assert verdict.problem == ""
    assert all(word in "; ".join(verdict.doubts) for word in words)
    assert bool(verdict.doubts) == bool(words)


def test_verdict_seconds_are_oracle_means() -> None:
    trials = [trial("oracle", 1), trial("oracle", 1), trial("nop", 0)]
    trials[0].seconds.verifier, trials[2].seconds.verifier = 3.0, 100.0
    assert verdict_of("t", "k", trials).seconds == Timings(verifier=2.0)


def test_report_has_stack_trace_of_librarys_exception(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "tasks", "looping")
    (tmp_path / "tasks/looping/solution/one").symlink_to("two")
    (tmp_path / "tasks/looping/solution/two").symlink_to("one")
    options = ["--environment-kwarg", "image=host", "--repeats", "1", "--cheats", "none"]
    assert main(["tasks", "check", str(tmp_path / "tasks"), *options, "--json", str(tmp_path / "report.json")]) == 1
    (verdict,) = json.loads((tmp_path / "report.json").read_text())["tasks"]
    assert verdict["findings"][0]["category"] == "task"
    assert verdict["trace"].startswith("Traceback") and "Error: " in verdict["trace"]
    printed = capsys.readouterr()
    assert "BAD  looping" in printed.out and "Traceback" not in printed.out + printed.err


STOPPED = "stopped; to continue, run the same command with --resume\n"
CHECK = "import sys; from harbortrainer.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_check_loses_no_verdict(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks", "first", solution="echo no such tool >&2; exit 3")
    write_task(tmp_path / "tasks", "second", solution="sleep 3000")
    reports = ["--json", "found/check.json", "--markdown", "found/check.md", "--environment-kwarg", "image=host"]
    words = ["tasks", "check", "tasks", "--repeats", "1", "--cheats", "none", "--parallel", "2", *reports]
    child = subprocess.Popen([sys.executable, "-c", CHECK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and b"BAD  first" in child.stdout.readline()
    child.send_signal(number)
    out, err = child.communicate()
    assert (child.returncode, err.decode()) == {signal.SIGTERM: (130, STOPPED), signal.SIGKILL: (-9, "")}[number], out
    for _ in range(2):
        report = json.loads(Path("found/check.json").read_text())
        assert [task["task"] for task in report["tasks"]] == ["first"]
        words_of_both = "the solution failed (the solution ended with exit code 3, its last lines: no such tool) "
        assert f"{words_of_both}(the verifier's last lines: /app/done is missing)" in report["tasks"][0]["problem"]
        assert "| first | BAD | 0 | 0 |" in Path("found/check.md").read_text()
        assert main([*words, "--resume", "--include", "first"]) == 1
    assert capsys.readouterr().out.count("1 tasks were checked before") == 2


def test_a_torn_log_line_is_dropped_and_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    VERDICTS_FILE.parent.mkdir()
    log, other = VerdictLog({"repeats": 1}), VerdictLog({"repeats": 3})
    first, second = (verdict_of(name, name, [trial("oracle", 1), trial("nop", 0)]) for name in "ab")
    log.add(first)
    other.add(second)
    whole = VERDICTS_FILE.read_text()
    VERDICTS_FILE.write_text(whole + whole[:50])
    log.add(second)
    assert log.read() == {("a", ""): first, ("b", ""): second} and other.read() == {("b", ""): second}


def test_verdicts_that_depend_on_this_machine_are_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = VerdictLog({})
    for blame in ("host", "network"):
        lost = trial("oracle", None, Outcome.sandbox_error).model_copy(update={"blame": blame})
        log.add(verdict_of("a", "a", [lost]))
    log.add(Verdict(task="b", key="b", findings=[bad("unsupported", "refused")]))
    assert log.read() == {} and not VERDICTS_FILE.exists()


def test_later_finding_withdraws_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks", "a")
    (task,) = load_folder("tasks")

    def check(command: str, *others: CheckedTrial, leftovers: str = "keep") -> None:
        found = verdict_of("a", task.key, [trial("oracle", 1), trial("nop", 0), *others])
        found.environment = "local"
        run_trials = "harbortrainer.commands.check_tasks.run_trials"
        monkeypatch.setattr(run_trials, lambda tasks, where, plan, cheats, on_verdict: on_verdict(found))
        main(["tasks", command, "tasks", "--ek", "image=host", "--leftovers", leftovers])

    check("audit")
    check("check", leftovers="kill")
    check("check", trial("nop", None, Outcome.sandbox_error).model_copy(update={"blame": "host"}))
    check("check", trial("guessed-42", 1))
    assert passed_in("local") == audited_keys() == {task.key}
    check("audit", trial("guessed-42", 1))
    assert passed_in("local") == {task.key} and not audited_keys()
    check("audit")
    check("check", trial("oracle", 0))
    assert not passed_in("local") and not audited_keys() and passed_in("local+kill") == {task.key}


def test_one_task_that_needs_buildx_does_not_end_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = {"info": '{"ServerVersion": "1"}', "compose": "2.30.0", "buildx": None}
    monkeypatch.setattr(docker_daemon, "program_output", lambda *words, **_: answers[words[1]])
    monkeypatch.setattr(docker_daemon.shutil, "which", lambda name: name)
    closed = "services: {main: {}}"
    write_task(tmp_path / "tasks", "closed", toml='[environment]\nnetwork_mode = "no-network"\n')
    (tmp_path / "tasks/closed/environment/docker-compose.yaml").write_text(closed)
    write_task(tmp_path / "tasks", "tpu", toml=f"[environment]\n{TPU}")
    assert main(["tasks", "check", "tasks", "--environment", "docker"]) == 1
    out = capsys.readouterr().out
    assert "BAD  closed  --environment: docker has no `buildx` command" in out
    assert "0 of 2 tasks are fit to train on (not fit: host 1, unsupported 1)" in out
    assert main(["tasks", "check", "tasks", "--environment", "docker", "--exclude", "tpu"]) == 2
    assert "docker has no `buildx` command" in capsys.readouterr().err, "no task can run"
