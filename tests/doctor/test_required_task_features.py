"""Placement of tasks by `auto`, and findings on tasks that their sandbox cannot run or that access this machine."""

import shutil
from pathlib import Path

import pytest

from harbortrainer.doctor import refused_tasks, task_checks
from harbortrainer.doctor.finding import Level
from harbortrainer.errors import UserError
from harbortrainer.sandbox import network_choice
from harbortrainer.tasks.task_folder import load_folder

pytestmark = pytest.mark.process


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task that a local sandbox supports, and one with a sidecar."""
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "sidecar"):
        folder = tmp_path / "tasks" / name
        (folder / "environment").mkdir(parents=True)
        (folder / "environment" / "Dockerfile").write_text("FROM debian:12-slim\n")
        (folder / "task.toml").write_text('version = "1.0"\n')
        (folder / "instruction.md").write_text(name)
        (folder / "tests").mkdir()
        (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (tmp_path / "tasks/sidecar/environment/docker-compose.yaml").write_text("services: {}\n")
    return tmp_path / "tasks"


def run(plan, environment_type: str, **env):
    harness = {"environment_type": environment_type, "environment_kwargs": {"image": "host"}}
    taskset = {"id": "harbor_env", "tasks_dir": "tasks"} | env
    return plan(sources=[{"env": {"taskset": taskset, "agent": {"harness": harness}}}])


def test_auto_reports_placement_and_reasons(tasks, plan):
    auto = run(plan, "auto")
    line = "auto: 1 in local, 1 in docker: sidecar (environment/docker-compose.yaml)"
    assert task_checks.placement_lines(auto) == [line]
    assert list(auto.environment_types) == ["docker", "local"]
    assert task_checks.placement_lines(run(plan, "local")) == []


def test_unsupported_task_is_red_with_reason(tasks, plan):
    (found,) = [finding for finding in task_checks.check_requirements(run(plan, "local")) if finding.level is Level.RED]
    assert found.what == ("environment_type = 'local' cannot run 1 task: sidecar (environment/docker-compose.yaml)")
    assert "auto" in found.do and found.where.endswith("agent.harness.environment_type")
    assert list(task_checks.check_requirements(run(plan, "docker"))) == []
    assert list(task_checks.check_requirements(run(plan, "local", exclude=["sidecar"]))) == []


def test_compose_access_to_this_machine_is_red_unless_task_is_trusted(tasks, plan, capsys):
    (tasks / "sidecar/environment/docker-compose.yaml").write_text("services: {main: {volumes: ['/:/host']}}")
    (found,) = [finding for finding in task_checks.check_requirements(run(plan, "auto")) if finding.level > Level.GREEN]
    assert found.level is Level.RED
    assert "sandboxes can access this machine in 1 task: sidecar (main can write / of this machine)" in found.what
    assert 'add `trusted_tasks = ["sidecar"]` to [env.agent.harness]' in found.do
    assert found.where.endswith("source[0].env.agent.harness.trusted_tasks")
    with pytest.raises(UserError, match=r"sidecar \(main can write / .*pass `--trust sidecar`"):
        task_checks.refuse_unsupported(load_folder(tasks), "docker", {}, "--environment", trusted=["plain"])
    trusting = task_checks.refuse_unsupported(load_folder(tasks), "docker", {}, "--environment", trusted=["side*"])
    assert trusting.placements == {"docker": ["plain", "sidecar"]}
    assert "warning: --environment: sandboxes can access this machine in 1 task" in capsys.readouterr().out


def test_task_without_tests_is_red(tasks, plan):
    (tasks / "plain/tests/test.sh").rename(tasks / "plain/tests/run.sh")
    (red,) = refused_tasks.check_refused(run(plan, "docker"))
    assert red.level is Level.RED and red.what.startswith("Harbor refuses 1 task: plain (Task directory ")
    assert "does not contain tests/test.sh" in red.what and red.where.endswith(".taskset.tasks_dir")
    with pytest.raises(UserError, match=r"Harbor refuses 1 task: plain \("):
        task_checks.refuse_unsupported(load_folder(tasks), "docker", {}, "--environment")


def test_host_network_is_yellow(tasks, plan, monkeypatch):
    (tasks / "plain" / "instruction.md").write_text("Serve it at localhost:8080 and localhost:8081.")
    shutil.copytree(tasks / "plain", tasks / "open")
    (tasks / "open" / "instruction.md").write_text("Do it.")

    def warnings(kind: str, **kwargs: str) -> list[str]:
        found = task_checks.inspect_tasks(load_folder(tasks), kind, kwargs, {})
        return [finding.what for finding in task_checks._findings(found, kind, "") if finding.level is Level.YELLOW]

    reach = "the agent can reach this machine's localhost in 2 tasks: open; plain"
    share = "parallel trials share this machine's ports and can reach each other in 1 task: plain (8080, 8081)"
    monkeypatch.setattr(network_choice, "slirp_problem", lambda: "")
    assert warnings("auto") == []
    assert warnings("auto", network="host") == [share]
    monkeypatch.setattr(network_choice, "slirp_problem", lambda: "slirp4netns is not here")
    assert warnings("auto") == [reach, share]
    assert warnings("auto", network="host") == [share]
    assert warnings("docker") == []


@pytest.mark.parametrize(
    ("value", "resolved"),
    [
        ("http://localhost:8000/v1", "localhost:8000"),
        ("https://me:secret@127.0.0.1/", "127.0.0.1"),
        ("http://[::1]:5000", "[::1]:5000"),
        ("http://localhost.example.com/v1", ""),
        ("http://example.com/?from=localhost", ""),
        ("localhost", ""),
    ],
)
def test_localhost_url_in_variable_is_yellow(tasks, monkeypatch, value, resolved):
    (tasks / "plain" / "task.toml").write_text('[verifier.env]\nURL = "${JUDGE_URL}"\nOWN = "http://localhost:1"\n')
    monkeypatch.setattr(network_choice, "slirp_problem", lambda: "")

    def warnings(kind: str, **kwargs: str) -> list[str]:
        found = task_checks.inspect_tasks(load_folder(tasks), kind, kwargs, {"JUDGE_URL": value})
        return [finding.what for finding in task_checks._findings(found, kind, "") if finding.level is Level.YELLOW]

    what = "localhost URLs are passed into the sandbox, where localhost is the sandbox itself, in 1 task: "
    expected = [f"{what}plain ([verifier.env] URL is $JUDGE_URL, {resolved})"] if resolved else []
    assert warnings("auto") == warnings("docker") == expected
    assert warnings("auto", network="host") == warnings("modal") == []


def test_ignored_task_key_is_yellow(tasks, plan):
    (tasks / "plain" / "task.toml").write_text("[verifier]\ntimeout = 5\n")
    (found,) = task_checks.check_requirements(run(plan, "docker"))
    assert found.level is Level.YELLOW
    assert found.what == "Harbor ignores these task.toml keys (1 task): plain (verifier.timeout)"


def test_ignored_compose_file_is_yellow(tasks, plan):
    (tasks / "plain" / "environment" / "docker-compose.yml").write_text("services: {main: {privileged: true}}")
    (found,) = task_checks.check_requirements(run(plan, "docker"))
    assert found.level is Level.YELLOW and found.do == "rename the file to docker-compose.yaml, or remove it"
    what = "Harbor ignores a compose file and builds the Dockerfile in 1 task: plain (environment/docker-compose.yml)"
    assert found.what == what


def test_variable_from_dotenv_is_set(tasks, plan):
    (tasks / "plain" / "task.toml").write_text('[verifier.env]\nNAME = "${NOBODY_SETS_THIS}"\n')
    (found,) = task_checks.check_requirements(run(plan, "docker"))
    assert "plain ([verifier.env] NAME: $NOBODY_SETS_THIS is not set)" in found.what
    (tasks.parent / ".env").write_text("NOBODY_SETS_THIS=1\n")
    assert list(task_checks.check_requirements(run(plan, "docker"))) == []


def test_evaluation_refuses_unsupported_tasks(tasks):
    with pytest.raises(UserError, match=r"sidecar \(environment/docker-compose.yaml\)"):
        task_checks.refuse_unsupported(load_folder(tasks), "local", {"image": "host"}, "--environment")
    assert task_checks.refuse_unsupported(
        load_folder(tasks), "auto", {"image": "host"}, "--environment"
    ).placements == {
        "local": ["plain"],
        "docker": ["sidecar"],
    }
