"""Cleanup: a run's processes, containers and remote sandboxes end, also those of a killed start; other runs' stay."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.commands import local_run
from harbortrainer.config.environment_table import ENVIRONMENT_TYPES, EnvironmentEntry
from harbortrainer.config.reader import load
from harbortrainer.config.runfile import RunConfig
from harbortrainer.engines.cleanup import clean_up, clean_up_predecessor, end_processes, end_sandboxes
from harbortrainer.errors import UserError
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import owner_state, run_label
from harbortrainer.sandbox.environment_types import environment_config
from harbortrainer.sandbox.inventory import InventoryError, inventory

NO_PYTHON = [Path("/no/python")]


def test_keeps_processes_of_other_runs() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"HARBORTRAINER_RUN": "other"})
    try:
        assert end_processes("this-run-does-not-exist") == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_ends_processes_of_one_owner() -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            env={"HARBORTRAINER_RUN": "owned-r-1", "HARBORTRAINER_OWNER": owner},
        )
        for owner in ("server-1", "server-2")
    ]
    try:
        assert end_processes("owned-r-1", owner="server-1") == 1
        assert [process.poll() is None for process in started] == [False, True]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture
def docker_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a `docker` whose run r-1 has a container with a sidecar and a network."""
    calls, docker = tmp_path / "calls", tmp_path / "docker"
    docker.write_text(
        f"""#!/bin/bash
echo "$@" >> {calls}
case "$*" in
  *"label=harbortrainer.run=r-1"*) echo '["c1","r-1","","t","2026-01-02 03:04:05 +0000 UTC"]' ;;
  *"--filter=id=c1"*) echo proj ;;
  "ps -aq --filter=label=com.docker.compose.project=proj") printf 'c1\\nc2\\n' ;;
  "network ls"*) echo n1 ;;
esac
"""
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return calls


def test_removes_containers_and_networks_of_run(docker_calls: Path) -> None:
    assert clean_up("r-1", ["auto"]) == ["cleaned up: 1 docker sandboxes"]
    commands = docker_calls.read_text().splitlines()
    assert "rm --force --volumes c1 c2" in commands and "network rm n1" in commands
    assert clean_up("r-2", ["auto"]) == clean_up("r-1", ["local"]) == []


def test_docker_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/bash\necho 'cannot connect to the daemon' >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (line,) = end_sandboxes("r-1", ["docker"])
    assert line == "warning: docker sandboxes of killed trials may still run: cannot connect to the daemon"


MODAL = """
import json, types
from pathlib import Path
FILE = Path(__file__).with_suffix(".json")
class App:
    app_id = "app"
    @staticmethod
    def lookup(name, *, create_if_missing): return App()
class Sandbox:
    def __init__(self, object_id): self.object_id = object_id
    @staticmethod
    def list(*, app_id, tags):
        known = json.loads(FILE.read_text())
        return [Sandbox(one) for one, own in known.items() if tags.items() <= own.items()]
    @staticmethod
    def from_id(sandbox_id):
        json.loads(FILE.read_text())[sandbox_id]
        return Sandbox(sandbox_id)
    def get_tags(self): return json.loads(FILE.read_text())[self.object_id]
    def terminate(self): open(FILE.with_name("ended"), "a").write(self.object_id + "\\n")
"""
DAYTONA = """
import json
from dataclasses import dataclass
from pathlib import Path
FILE = Path(__file__).with_suffix(".json")
@dataclass
class ListSandboxesQuery:
    labels: dict
@dataclass
class Sandbox:
    id: str
    labels: dict
class Daytona:
    def list(self, query):
        for one, own in json.loads(FILE.read_text()).items():
            if query.labels.items() <= own.items():
                yield Sandbox(one, own)
    def get(self, number): return Sandbox(number, json.loads(FILE.read_text())[number])
    def delete(self, sandbox): open(FILE.with_name("ended"), "a").write(sandbox.id + "\\n")
"""


@pytest.fixture(params=["modal", "daytona"])
def provider(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A provider whose package is a stand-in with three sandboxes: of run r-1, of another run, and of Harbor alone."""
    name = request.param
    (tmp_path / f"{name}.py").write_text({"modal": MODAL, "daytona": DAYTONA}[name])
    monkeypatch.setenv("HARBORTRAINER_RUN", "r-1")
    ours = environment_config(name)["kwargs"]["labels"]
    assert isinstance(ours, dict)
    harbors = {"harbor.managed": "true", "harbor.environment_name": "fix-git"}
    known = {"s1": harbors | ours, "s2": harbors | ours | {"harbortrainer-run": "r-2"}, "s3": harbors}
    (tmp_path / f"{name}.json").write_text(json.dumps(known))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return name


def test_ends_remote_sandboxes_of_run(provider: str, tmp_path: Path) -> None:
    assert clean_up("r-3", [provider], NO_PYTHON) == []
    assert clean_up("r-1", [provider], NO_PYTHON) == [f"cleaned up: 1 {provider} sandboxes"]
    assert (tmp_path / "ended").read_text() == "s1\n"


def test_ends_the_others_if_one_is_gone(provider: str, tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="KeyError: 'gone'"):
        inventory(provider, NO_PYTHON).end(["gone", *["s1"] * 40])
    assert (tmp_path / "ended").read_text() == "s1\n" * 40


def test_lists_remote_sandboxes_of_this_project(provider: str) -> None:
    from harbortrainer.sandbox.inventory import find_sandboxes

    found = find_sandboxes(provider)
    assert [(one.id, one.run, one.task, one.state) for one in found] == [
        ("s1", "r-1", "fix-git", "running"),
        ("s2", "r-2", "fix-git", "running"),
    ]
    assert all(one.since.isdigit() for one in found)


def test_missing_package_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "modal.py").write_text("raise ModuleNotFoundError('no modal here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (line,) = clean_up("r-1", ["modal", "e2b"], NO_PYTHON)
    assert line.startswith("warning: modal sandboxes") and "no modal here" in line


def test_failed_request_is_reported_rather_than_missing_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\necho 'AuthError: Token missing' >&2; exit 1\n")
    python.chmod(0o755)
    assert clean_up("r-1", ["modal"], [python])[0].endswith("AuthError: Token missing")


TOY = """
import json, os, sys
if sys.argv[1] == "find":
    print("some log line"); print(json.dumps([{"id": "s1", "run": sys.argv[2]}]))
else:
    open(os.environ["TOY"], "a").write(" ".join(sys.argv[2:]) + "\\n")
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register the remote type `toy`, whose runs always have a sandbox; return the file that names the ended ones."""
    (tmp_path / "toy_inventory.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TOY", str(tmp_path / "ended"))
    monkeypatch.setitem(ENVIRONMENT_TYPES, "toy", EnvironmentEntry(remote=True, inventory="toy_inventory"))
    return tmp_path / "ended"


def unstopped(trials: Path, kind: str, run: str) -> Path:
    """Write the entry of a run's sandbox that did not stop."""
    (trials / ".unstopped").mkdir(parents=True, exist_ok=True)
    entry = trials / ".unstopped" / f"{kind}-{run}.json"
    entry.write_text(
        json.dumps({"sandbox": f"{kind}__env", "environment_type": kind, "run": run, "fault": "no answer"})
    )
    return entry


def test_next_start_ends_sandboxes_and_removes_their_entries(toy: Path, tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    trials = [run / "trials", tmp_path / "shared"]
    assert clean_up_predecessor(run, ["toy"], trials, NO_PYTHON) == [], "no earlier start"
    label = run_label(run)
    entries, other = (
        [unstopped(trials[0], "e2b", label), unstopped(trials[1], "toy", label)],
        unstopped(trials[1], "toy", "r"),
    )
    lines = clean_up_predecessor(run, [], trials, NO_PYTHON)
    assert lines[0] == "cleaned up: 1 toy sandboxes" and toy.read_text() == "s1\n", "of a type that the run had before"
    assert lines[1:] == ["warning: e2b sandbox e2b__env was not stopped (no answer); end it at the provider"]
    assert not any(entry.exists() for entry in entries)
    assert other.exists(), "another run's"


def test_entries_stay_if_the_provider_does_not_answer(toy: Path, tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    entry = unstopped(run / "trials", "toy", run_label(run))
    (tmp_path / "toy_inventory.py").write_text("import sys; sys.exit('no answer')")
    (line,) = clean_up_predecessor(run, ["toy"], [run / "trials"])
    assert "warning" in line and entry.exists()


@pytest.mark.parametrize("clean", [False, True])
def test_embedded_run_ends_sandboxes_of_killed_start(
    clean: bool, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from project_folder import RUN_FILE, write_project

    monkeypatch.chdir(write_project(tmp_path))
    Path("run.toml").write_text(RUN_FILE)
    shared = ["--orchestrator.train.source.0.env.agent.harness.trials-dir", str(tmp_path / "shared")]
    config = load("run.toml", [*shared, *(["--clean"] if clean else [])])
    started: list[str] = []

    def train(*_: object, **__: object) -> str:
        started.append(toy.read_text() if toy.exists() else "")
        assert not any((tmp_path / "shared").rglob("*.json")), "the earlier start's"
        unstopped(tmp_path / "shared", "e2b", run_label(config.run_dir))
        raise KeyboardInterrupt

    monkeypatch.setattr(local_run, "train", train)
    for resume in (False, not clean):
        toy.unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt):
            local_run.run_here(config, resume=resume, kinds=["toy"])
        printed = capsys.readouterr().err
        assert "cleaned up: 1 toy sandboxes" in printed
        assert "e2b sandbox e2b__env was not stopped (no answer); end it at the provider" in printed, "at the end"
        assert not any((tmp_path / "shared").rglob("*.json"))
        unstopped(tmp_path / "shared", "toy", run_label(config.run_dir))  # as a killed start leaves it
    assert started == ["", "s1\n"] and toy.read_text() == "s1\ns1\n", "before the second start, and after it"


@pytest.mark.parametrize("resume", [False, True])
def test_mistake_at_the_start_is_reported_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """A new run's folder is removed. A resumed one has the trials and logs of its earlier start."""
    from project_folder import RUN_FILE, write_project

    from harbortrainer.engines.local.session import local_run as local_session

    monkeypatch.chdir(write_project(tmp_path))
    Path("run.toml").write_text(RUN_FILE)

    def train(config: RunConfig, run: RunFolder, **_: object) -> None:
        with local_session(config, run, resume=resume):
            raise UserError("the warm-up's tasks are the same")

    monkeypatch.setattr(local_run, "train", train)
    config = load("run.toml")
    if resume:
        earlier = RunFolder.create(config.output_dir, config.run.dir, config_text=config.resolved())
        (earlier.log / "env.log").write_text("why each trial failed")
        earlier.release()
    with pytest.raises(UserError, match=r"^the warm-up's tasks are the same$"):
        local_run.run_here(config, resume=resume, kinds=["local"])
    assert config.run_dir.exists() == resume, "a new run can be started again under its name"
    assert (config.run_dir / "log/env.log").exists() == resume


def test_sandboxes_have_labels_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBORTRAINER_RUN", "r-1")
    labels = environment_config("modal", {"labels": {"a": "b"}})["kwargs"]["labels"]
    assert isinstance(labels, dict)
    assert (labels["harbortrainer-run"], labels["a"]) == ("r-1", "b")
    assert owner_state(labels["harbortrainer-owner"]) == "running" and labels["harbortrainer-since"].isdigit()
    assert environment_config("docker")["import_path"].endswith("DockerSandbox")
    assert "labels" not in environment_config("e2b")["kwargs"]
