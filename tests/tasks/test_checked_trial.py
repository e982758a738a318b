"""A trial of a check shows what its solution and verifier wrote last, and which part a failure blames."""

from collections.abc import Collection
from pathlib import Path

import pytest

from harbortrainer.tasks.checked_trial import CheckedTrial, checked_trial
from harbortrainer.tasks.verdict import verdict_of
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Failure, Timings, TrialRecord


def trial(
    folder: Path,
    *,
    solution: str = "",
    verifier: str = "",
    code: int = 0,
    closed: Collection[str] = (),
    outcome: Outcome = Outcome.completed,
    reward: float | None = 0.0,
    error: Failure | None = None,
) -> CheckedTrial:
    """Summarize an oracle's trial with these logs."""
    for name, text in (("agent/oracle.txt", solution), ("verifier/test-stdout.txt", verifier)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if code:
        (folder / "agent/exit-code.txt").write_text(str(code))
    record = TrialRecord(
        task="t",
        trial_dir=str(folder),
        timings=Timings(agent_execution=1.0),
        outcome=outcome,
        reward=reward,
        rewards=None if reward is None else {"reward": reward},
        error=error,
    )
    return checked_trial("oracle", record, closed)


def finding(one: CheckedTrial) -> tuple[str, str]:
    (found,) = verdict_of("t", "k", [one]).findings
    return found.category, found.what


def test_shows_last_lines_of_solution_and_verifier_and_the_exit_code(tmp_path: Path) -> None:
    one = trial(tmp_path, solution="a\nb\n\nc\nd\n", verifier="1 failed\n", code=7)
    category, what = finding(one)
    assert category == "solution" and what == (
        "the oracle's reward is 0, not 1: the solution failed (the solution ended with exit code 7, its last lines: "
        "b | c | d) (the verifier's last lines: 1 failed)"
    )


def test_a_solution_without_output_is_said_so(tmp_path: Path) -> None:
    assert finding(trial(tmp_path))[1].endswith(
        "the solution or the verifier is wrong (the solution ended with exit code 0 and no output)"
    )


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    one = trial(tmp_path, solution="Could not resolve host: a\n" + "x" * 100_000 + "\nlast\n")
    assert one.network_error == "" and one.solution_words.endswith("x | last") and len(one.solution_words) <= 400


@pytest.mark.parametrize(
    "line",
    [
        "curl: (6) Could not resolve host: example.org",
        "W: Failed to fetch http://deb.debian.org/  Temporary failure resolving 'deb.debian.org'",
        "pip: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
        "npm error code EAI_AGAIN",
        "go: dial tcp 142.250.1.1:443: connect: connection refused",
    ],
)
def test_an_address_that_is_not_reached_is_the_networks_unless_the_task_forbids_it(line: str, tmp_path: Path) -> None:
    category, what = finding(trial(tmp_path, verifier=f"{line}\nno tests ran\nreward 0\nend\n"))
    assert category == "network" and f"an address was not reached ({line})" in what
    assert finding(trial(tmp_path, verifier=line, closed={"verifier"}))[0] == "solution"
    assert finding(trial(tmp_path, solution=line, closed={"verifier"}))[0] == "network"


@pytest.mark.parametrize("line", ["Failed to connect to localhost port 8080", "Failed to connect to 127.0.0.1 port 1"])
def test_a_service_of_the_task_is_not_the_network(line: str, tmp_path: Path) -> None:
    assert finding(trial(tmp_path, verifier=line))[0] == "solution"


@pytest.mark.parametrize(
    ("kind", "message", "category"),
    [
        ("SandboxBuildError", "the Dockerfile cannot be built: RUN false", "build"),
        ("RuntimeError", "the image cannot be built at `RUN false` (code 1): ...", "build"),
        ("EnvironmentBuildTimeoutError", "600 s", "build"),
        ("SandboxBuildError", "RUN pip install a: Could not resolve host: pypi.org", "network"),
        ("RuntimeError", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "host"),
        ("RuntimeError", "the image cannot be built (code 125): unknown flag: --file", "host"),
        ("HealthcheckError", "Healthcheck failed after 3 retries", "task"),
        ("SandboxStartError", "clone: Operation not permitted", "host"),
    ],
)
def test_a_sandbox_that_does_not_start_blames_one_part(kind: str, message: str, category: str, tmp_path: Path) -> None:
    error = Failure(type=kind, message=message)
    assert finding(trial(tmp_path, outcome=Outcome.sandbox_error, reward=None, error=error))[0] == category


@pytest.mark.parametrize(
    ("outcome", "reward", "category"),
    [
        (Outcome.verifier_error, None, "verifier"),
        (Outcome.agent_timeout, 0.0, "solution"),
        (Outcome.agent_error, None, "solution"),
        (Outcome.cancelled, None, "host"),
    ],
)
def test_other_failures_blame_the_part_that_ran(
    outcome: Outcome, reward: float | None, category: str, tmp_path: Path
) -> None:
    error = Failure(type="SomeError", message="it failed")
    assert trial(tmp_path, outcome=outcome, reward=reward, error=error).blame == category


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ("/tests/test.sh: line 3: pytest: command not found", True),
        ("/tests/test.sh: 3: uvx: not found", True),
        ("/usr/bin/python3: No module named pytest", True),
        ("curl: (6) Could not resolve host: astral.sh", True),
        ("FAILED test_a.py::test_total - FileNotFoundError: [Errno 2] No such file or directory", False),
    ],
)
def test_names_what_the_verifier_lacks(line: str, lacks: bool, tmp_path: Path) -> None:
    one = trial(tmp_path, solution="make: command not found", verifier=f"{line}\n\ndone\n", closed=["verifier"])
    assert one.verifier_lacks == (line if lacks else "")
