"""Launching Prime-RL, with a real process in the place of `rl`: output, signals, exit codes, and nothing left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from task_sets import make_task

from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl import command
from harbortrainer.engines.prime_rl.attempt import LOG
from harbortrainer.engines.prime_rl.checkout import SOURCE, Checkout
from harbortrainer.engines.prime_rl.cleanup import clean_up, end_processes
from harbortrainer.engines.prime_rl.failure_report import report
from harbortrainer.engines.prime_rl.remote import end_remote
from harbortrainer.engines.prime_rl.start import LOCK, start
from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import Ingredients
from harbortrainer.runs.run_lock import RunLock
from harbortrainer.sandbox.environment_types import environment_config
from harbortrainer.tasks.task_folder import load_task

TELL = "import os, sys, json; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"
FAIL = "import sys; print('ERROR Error: Orchestrator failed with exit code 137'); sys.exit(1)"
DRIVER = """
import sys
from pathlib import Path
from harbortrainer.config.reader import read
from harbortrainer.engines.prime_rl import command
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.start import start
command.find_uv = lambda: None
sys.exit(start(read(sys.argv[1]), Checkout(Path(sys.argv[2])), [], grace_s=float(sys.argv[3])))
"""
WAIT = """
import signal, sys, time
def on(number, frame):
    print('got', number, flush=True)
    if {polite}:
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on)
print('ready', flush=True)
while True:
    time.sleep(0.05)
"""
ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', 'of this test'], start_new_session=True,
                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print('left one behind', flush=True)
"""


def drive(path: Path, checkout: Checkout, grace_s: float = 10) -> subprocess.Popen[str]:
    """The launcher as a process of its own, to be sent signals."""
    words = [sys.executable, "-c", DRIVER, str(path), str(checkout.root), str(grace_s)]
    env = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    pytest.fail(f"never said {word!r}")


def last_json(log: Path) -> dict:
    import json

    return json.loads(log.read_text().splitlines()[-1])


def test_the_file_and_the_overrides_reach_rl_and_its_output_reaches_the_log(run_file, stand_in, tmp_path, capfd):
    path = run_file()
    code = start(read(path), stand_in(TELL), ["--max-steps", "3"], resume=True)
    assert code == 0
    told = last_json(tmp_path / "outputs" / "r" / LOG)
    assert told["argv"] == ["@", str(path), "--max-steps", "3", "--resume"]
    assert '"argv"' in capfd.readouterr().out


def test_the_plugin_is_on_the_path_and_dotenv_is_loaded(run_file, stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text('WANDB_API_KEY="secret"\nALREADY=from-file\n')
    monkeypatch.setenv("ALREADY", "from-shell")
    start(read(run_file()), stand_in(TELL), [])
    env = last_json(tmp_path / "outputs" / "r" / LOG)["env"]
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(SOURCE)
    assert env["WANDB_API_KEY"] == "secret" and env["ALREADY"] == "from-shell"
    assert env["HARBORTRAINER_RUN"].startswith("r-")
    assert env["SPT_NOENV"] == "1", "a process that renames itself would overwrite the variable before"
    assert env["HARBORTRAINER_TRIALS_DIR"] == str(tmp_path / "outputs" / "r" / "trials")
    assert env["PATH"].split(os.pathsep)[0].endswith(".venv/bin")


def test_a_dry_run_is_passed_on(run_file, stand_in, tmp_path):
    start(read(run_file()), stand_in(TELL), [], dry_run=True)
    assert last_json(tmp_path / "outputs" / "r" / LOG)["argv"][-1] == "--dry-run"


def test_the_command_for_the_user_works_from_the_root_of_the_repository(run_file, stand_in, capfd):
    start(read(run_file()), stand_in(TELL), [])
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("the same without")]
    assert "PYTHONPATH=" in line and "uv run --project" in line and "--no-sync rl @" in line
    assert "--directory" not in line, "it would change what relative paths mean"


def test_an_old_file_reaches_rl_in_todays_spelling(stand_in, tmp_path):
    path = tmp_path / "old.toml"
    old = '[[orchestrator.env]]\nid = "harbor_env"\nname = "h"\nargs = { max_turns = 3 }  # why\n'
    path.write_text(f'output_dir = "{tmp_path}/outputs"\nrun = {{ name = "r" }}\nseed = 3\n{old}')
    start(read(path), stand_in(TELL), [])
    given = Path(last_json(tmp_path / "outputs" / "r" / LOG)["argv"][1])
    assert given == tmp_path / "outputs" / "r" / "configs" / "harbortrainer.toml"
    text = given.read_text()
    assert "[[orchestrator.train.source]]" in text and "# why" in text and "seed" not in text
    assert path.read_text().startswith("output_dir")


def test_a_run_says_what_it_trains_on_and_a_resume_is_held_to_it(run_file, stand_in, tmp_path):
    task = make_task(tmp_path / "tasks" / "one")
    path, checkout = run_file(tasks=tmp_path / "tasks"), stand_in(TELL)
    start(read(path), checkout, [])
    made_of = Ingredients.model_validate_json((tmp_path / "outputs/r/configs/made_of.json").read_text())
    ((source, tasks),) = made_of.tasks.items()
    assert tasks == {"one": load_task(task).key}
    assert made_of.origins[source].source == str(tmp_path / "tasks")
    assert start(read(path), checkout, [], resume=True) == 0
    (task / "instruction.md").write_text("Do something else.")
    with pytest.raises(UserError, match="have changed since this run was started: one is another"):
        start(read(path), checkout, [], resume=True)


def test_clean_deletes_the_earlier_run_before_the_log_lies_in_it(run_file, stand_in, tmp_path):
    old = tmp_path / "outputs" / "r" / "checkpoints"
    old.mkdir(parents=True)
    start(read(run_file("clean = true")), stand_in(TELL), [])
    assert not old.exists()
    assert last_json(tmp_path / "outputs" / "r" / LOG)["argv"][-1] == "--no-clean"


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"clean": True}])
def test_a_folder_that_another_run_writes_into_is_refused(run_file, stand_in, tmp_path, more):
    run_dir, options = tmp_path / "outputs" / "r", dict(more)
    path = run_file("clean = true" if options.pop("clean", False) else "")
    prime_rl = stand_in(WAIT.format(polite=True))
    first = drive(path, prime_rl)
    try:
        wait_for(first, "ready")
        before = sorted(run_dir.rglob("*"))
        with pytest.raises(UserError, match=f"process {first.pid} on") as refused:
            start(read(path), prime_rl, [], **options)
        assert str(run_dir) in str(refused.value) and sorted(run_dir.rglob("*")) == before, "nothing was touched"
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(30)
    RunLock(run_dir, LOCK).release()


def test_the_exit_code_is_the_childs_and_its_last_lines_are_shown(run_file, stand_in, tmp_path, capfd):
    log = tmp_path / "outputs" / "r" / "logs" / "latest" / "orchestrator.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "MemoryError: no more\n")
    assert start(read(run_file()), stand_in(FAIL), []) == 1
    said = capfd.readouterr().err
    assert "orchestrator ended with exit code 137" in said
    assert str(log) in said and "MemoryError: no more" in said and "line 3\n" not in said


def test_a_child_that_dies_without_a_word_leaves_the_path_of_its_output(run_file, stand_in, tmp_path, capfd):
    assert start(read(run_file()), stand_in("import os; print('x'); os.kill(os.getpid(), 9)"), []) == 128 + 9
    said = capfd.readouterr().err
    assert "exit code 137" in said and LOG in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_child_once(run_file, stand_in, number):
    process = drive(run_file(), stand_in(WAIT.format(polite=True)))
    wait_for(process, "ready")
    process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 7
    assert rest.count(f"got {int(number)}") == 1
    assert "ended with exit code" not in rest, "who stops a run needs no report"


def test_a_child_that_does_not_listen_is_ended_after_the_grace(run_file, stand_in):
    process = drive(run_file(), stand_in(WAIT.format(polite=False)), grace_s=0.5)
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_second_interrupt_ends_it_at_once(run_file, stand_in):
    process = drive(run_file(), stand_in(WAIT.format(polite=False)), grace_s=60)
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    wait_for(process, "got 2")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL


def test_when_the_launcher_is_killed_the_child_is_told(run_file, stand_in, tmp_path):
    process = drive(run_file(), stand_in(WAIT.format(polite=True)))
    wait_for(process, "ready")
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=20)
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone


def test_a_process_that_the_run_left_behind_is_ended(run_file, stand_in, capfd):
    before = {process.pid for process in psutil.process_iter()}
    start(read(run_file()), stand_in(ORPHAN), [])
    assert "cleaned up: 1 processes" in capfd.readouterr().err
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and "of this test" in str(p.info)]
    assert not left


def test_processes_of_another_run_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"HARBORTRAINER_RUN": "other"})
    try:
        assert end_processes("this-run-does-not-exist") == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_containers_and_networks_of_the_run_are_removed(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(
        f"""#!/bin/bash
echo "$@" >> {calls}
case "$*" in
  *--format*) echo proj ;;
  "ps -aq --filter label=harbortrainer.run=r-1") echo c1 ;;
  "ps -aq --filter label=com.docker.compose.project=proj") printf 'c1\\nc2\\n' ;;
  "network ls"*) echo n1 ;;
esac
"""
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    left = clean_up("r-1")
    assert (left.containers, left.networks) == (2, 1)
    done = calls.read_text().splitlines()
    assert "rm --force --volumes c1 c2" in done and "network rm n1" in done


@pytest.mark.docker
def test_a_real_container_of_the_run_is_removed():
    image = "debian:12-slim"
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode:
        pytest.skip(f"no Docker daemon, or no image {image}")
    run = f"test-{os.getpid()}"
    words = ["docker", "run", "-d", "--network", "none", "--label", f"harbortrainer.run={run}", image, "sleep", "600"]
    name = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert clean_up(run).containers == 1
    assert subprocess.run(["docker", "inspect", name], capture_output=True, check=False).returncode != 0


MODAL = """
import types
class App:
    app_id = "app"
    @staticmethod
    def lookup(name, create_if_missing): return App()
class Sandbox:
    @staticmethod
    def list(app_id, tags):
        return [Sandbox()] if tags == {"harbortrainer-run": "r-1"} else []
    def terminate(self): open(__file__ + ".ended", "a").write("x")
"""


def test_sandboxes_at_modal_are_ended_by_the_runs_label(tmp_path, monkeypatch):
    (tmp_path / "modal.py").write_text(MODAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert end_remote("r-1", ["modal"], tmp_path / "no-python") == ["cleaned up: 1 sandboxes at modal"]
    assert (tmp_path / "modal.py.ended").read_text() == "x"
    assert end_remote("r-2", ["modal"], tmp_path / "no-python") == []


def test_a_provider_without_labels_is_told(tmp_path):
    (line,) = end_remote("r-1", ["e2b"], tmp_path / "no-python")
    assert "e2b" in line and "timeout" in line


def test_sandboxes_carry_the_runs_label(monkeypatch):
    monkeypatch.setenv("HARBORTRAINER_RUN", "r-1")
    assert environment_config("modal", {"labels": {"a": "b"}})["kwargs"]["labels"] == {
        "harbortrainer-run": "r-1",
        "a": "b",
    }
    assert environment_config("docker")["import_path"].endswith("LabelledDocker")
    assert "labels" not in environment_config("e2b")["kwargs"]


def test_without_prime_rl_nothing_is_started_or_written(run_file, tmp_path):
    with pytest.raises(UserError, match="git submodule update"):
        start(read(run_file()), Checkout(tmp_path / "prime-rl"), [])
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ("[warmup]\nfamily = 'x'\n", {}, "for the embedded engine"),
        ("clean = true\n", {"dry_run": True}, "clean would delete"),
    ],
)
def test_what_prime_rl_cannot_do_is_refused(run_file, stand_in, tmp_path, more, options, told):
    with pytest.raises(UserError, match=told):
        start(read(run_file(more)), stand_in(TELL), [], **options)
    assert not (tmp_path / "outputs").exists()


def test_the_log_of_an_env_server_is_found(tmp_path):
    log = tmp_path / "logs" / "latest" / "envs" / "train" / "Harbor.log"
    log.parent.mkdir(parents=True)
    log.write_text("boom\n")
    text = report(tmp_path, ["\x1b[31mTrain env server Harbor failed with exit code -9\x1b[0m"], tmp_path / LOG, 1)
    assert "train env server harbor ended with exit code -9" in text and "boom" in text


def test_uv_is_used_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_uv", lambda: "/opt/uv")
    words = command.build(Checkout(tmp_path), Path("a.toml"), ["--x", "1"])
    assert words == ["/opt/uv", "run", "--project", str(tmp_path), "--no-sync", "rl", "@", "a.toml", "--x", "1"]
