"""Launching Prime-RL, with a script in place of `rl`: output, signals, exit codes and cleanup."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from task_sets import make_task

from harbortrainer.config.reader import read
from harbortrainer.config.table import lookup
from harbortrainer.engines.cleanup import processes_of
from harbortrainer.engines.prime_rl import checkout, process
from harbortrainer.engines.prime_rl.checkout import SCHEMA, SOURCE, Checkout
from harbortrainer.engines.prime_rl.failure_report import report
from harbortrainer.engines.prime_rl.start import LABEL, LOCK, LOG, start
from harbortrainer.errors import UserError
from harbortrainer.runs import episode_limit
from harbortrainer.runs.label import owner_state, run_label
from harbortrainer.runs.locks import RunLock
from harbortrainer.runs.log_files import TAIL_BYTES, last_lines
from harbortrainer.runs.provenance import Provenance
from harbortrainer.tasks.task_folder import load_task

PRINT_ARGUMENTS = "import os, sys, json; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"
FAIL = "import sys; print('ERROR Error: Orchestrator failed with exit code 137'); sys.exit(1)"
LAUNCHER = """
import sys
from pathlib import Path
from harbortrainer.config.reader import read
from harbortrainer.engines.cleanup import processes_of
from harbortrainer.engines.prime_rl import checkout, process
from harbortrainer.engines.prime_rl.checkout import Checkout
from harbortrainer.engines.prime_rl.start import start
checkout.find_uv = lambda: None
sys.exit(start(read(sys.argv[1]), Checkout(Path(sys.argv[2])), [], grace_s=float(sys.argv[3])))
"""
WAIT_FOR_SIGNAL = """
import signal, sys, time
def on(number, frame):
    print('got', number, flush=True)
    if {exits}:
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
print('started a process', flush=True)
"""


def start_launcher(path: Path, checkout: Checkout, grace_s: float = 10) -> subprocess.Popen[str]:
    """Start the launcher as a process, which can receive signals."""
    command = [sys.executable, "-c", LAUNCHER, str(path), str(checkout.root), str(grace_s)]
    env = os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait_for_output(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    pytest.fail(f"never printed {word!r}")


def last_json(log: Path) -> dict:
    import json

    return json.loads(log.read_text().splitlines()[-1])


def test_passes_file_and_overrides_and_logs_output(run_file, stand_in, tmp_path, capfd):
    path = run_file()
    code = start(read(path), stand_in(PRINT_ARGUMENTS), ["--max-steps", "3"], resume=True)
    assert code == 0
    printed = last_json(tmp_path / "outputs" / "r" / LOG)
    assert printed["argv"] == ["@", str(path), "--max-steps", "3", "--resume"]
    assert '"argv"' in capfd.readouterr().out


WRITE_EPISODES = """
import os, time
from pathlib import Path
from pyzstd import decompress
rollouts = Path("{rollouts}")
for step in (1, 2, 3):
    file = rollouts / f"step_{{step}}/train/all/traces.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{{"id": "e", "traces": [{{"id": "t"}}]}}\\n')
    os.utime(file, (time.time() + (1 if step == 3 else -7200),) * 2)
until = time.time() + 30
while not any(b"row" in decompress(file.read_bytes()) for file in rollouts.rglob("*.zst")) and time.time() < until:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("option", [False, True])
def test_launcher_keeps_transcripts_mb(run_file, stand_in, tmp_path, capfd, monkeypatch, option):
    monkeypatch.setattr(episode_limit, "CHECK_S", 0.02)
    rollouts = tmp_path / "outputs/r/rollouts"
    path = run_file("" if option else "transcripts_mb = 0")
    rl = stand_in(WRITE_EPISODES.format(rollouts=rollouts))
    words = ["--transcripts-mb", "0"] if option else []
    assert start(read(path, words), rl, words) == 0
    assert list(rollouts.rglob("*.zst")) == [rollouts / "step_1/train/all/traces.jsonl.zst"]
    assert "has more than 0 MB (transcripts_mb)" in capfd.readouterr().err


def test_sets_pythonpath_and_loads_dotenv(run_file, stand_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text('WANDB_API_KEY="secret"\nALREADY=from-file\n')
    monkeypatch.setenv("ALREADY", "from-shell")
    start(read(run_file()), stand_in(PRINT_ARGUMENTS), [])
    env = last_json(tmp_path / "outputs" / "r" / LOG)["env"]
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(SOURCE)
    assert env["WANDB_API_KEY"] == "secret" and env["ALREADY"] == "from-shell"
    assert env["HARBORTRAINER_RUN"].startswith("r-")
    assert env["SPT_NOENV"] == "1", "renaming the process title would overwrite the environment"
    assert env["HARBORTRAINER_TRIALS_DIR"] == str(tmp_path / "outputs" / "r" / "trials")
    assert env["PATH"].split(os.pathsep)[0].endswith(".venv/bin")


def test_passes_dry_run(run_file, stand_in, tmp_path):
    start(read(run_file()), stand_in(PRINT_ARGUMENTS), [], dry_run=True)
    assert last_json(tmp_path / "outputs" / "r" / LOG)["argv"][-1] == "--dry-run"


@pytest.mark.parametrize("more", ["", "resume = { step = 2 }\n[ckpt]\noutput_dir = '/disk'"])
def test_dry_run_of_a_resume_leaves_the_run_alone(run_file, stand_in, tmp_path, more):
    """With its `resume`, `rl` would delete the steps after the checkpoint; without, it refuses the run's folder."""
    start(read(run_file(more)), stand_in(PRINT_ARGUMENTS), [], resume=True, dry_run=True)
    folder = str(tmp_path / "outputs" / "r" / "configs" / "dry_run")
    _, _, *options = last_json(tmp_path / "outputs" / "r" / LOG)["argv"]
    elsewhere = ["--ckpt.output-dir", folder] if more else []
    assert options == ["--dry-run", "--no-resume", "--output-dir", folder, *elsewhere]


def test_printed_command_works_from_repository_root(run_file, stand_in, capfd):
    start(read(run_file()), stand_in(PRINT_ARGUMENTS), [])
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("the same without")]
    assert "PYTHONPATH=" in line and "uv run --project" in line and "--no-sync rl @" in line
    assert "--directory" not in line, "relative paths would change their meaning"


def test_translates_old_key_names(stand_in, tmp_path):
    path = tmp_path / "old.toml"
    old = '[[orchestrator.env]]\nid = "harbor_env"\nname = "h"\nargs = { max_turns = 3 }\n'
    path.write_text(f'output_dir = "{tmp_path}/outputs"\nrun = {{ name = "r" }}\nseed = 3\n{old}')
    start(read(path), stand_in(PRINT_ARGUMENTS), [])
    file = Path(last_json(tmp_path / "outputs" / "r" / LOG)["argv"][1])
    assert file == tmp_path / "outputs" / "r" / "configs" / "harbortrainer.toml"
    text = file.read_text()
    assert "[[orchestrator.train.source]]" in text and "seed" not in text
    assert path.read_text().startswith("output_dir")


def test_copy_lacks_the_byte_order_mark_of_the_file(run_file, stand_in, tmp_path):
    path = run_file()
    path.write_text(path.read_text(), encoding="utf-8-sig")
    start(read(path), stand_in(PRINT_ARGUMENTS), [])
    copy = Path(last_json(tmp_path / "outputs" / "r" / LOG)["argv"][1])
    assert copy != path and tomllib.loads(copy.read_text()) == read(path).data


def make_newer(checkout: Checkout) -> Checkout:
    """Give a checkout the schema of a newer release."""
    schema = checkout.root / SCHEMA
    schema.parent.mkdir(parents=True)
    schema.write_text("class SourceGroupConfig(BaseConfig):\n    constant_trainer_batch_size: bool = True\n")
    return checkout


def with_newer_keys(path: Path) -> Path:
    path.write_text(path.read_text().replace("group_size = 4", "train.group_size = 4"))
    return path


def test_newer_checkout_gets_its_own_key_names(run_file, stand_in, tmp_path):
    words = ["--orchestrator.group-size", "4", "--max-steps", "7"]
    start(read(run_file(), words), make_newer(stand_in(PRINT_ARGUMENTS)), words)
    run_dir = tmp_path / "outputs" / "r"
    assert [path.name for path in run_dir.iterdir()] == ["configs"], "newer releases refuse other names in a new folder"
    argv = last_json(run_dir / "configs" / LOG)["argv"]
    assert argv == ["@", str(run_dir / "configs" / "harbortrainer.toml")]
    data = tomllib.loads(Path(argv[1]).read_text())
    assert (data["orchestrator"]["train"]["group_size"], data["max_steps"]) == (4, 7)
    assert "group_size" not in data["orchestrator"]


def test_newer_checkout_gets_the_users_own_newer_file(run_file, stand_in, tmp_path):
    path = with_newer_keys(run_file("[trainer.model.fusions]\nenabled = []\n"))
    words = ["--max-steps", "7"]
    start(read(path, words), make_newer(stand_in(PRINT_ARGUMENTS)), words)
    assert last_json(tmp_path / "outputs" / "r" / "configs" / LOG)["argv"] == ["@", str(path), *words]


def test_newer_checkout_reads_a_file_that_tells_no_release_itself(run_file, stand_in, tmp_path):
    path = run_file()
    path.write_text(path.read_text().replace("group_size = 4", ""))
    words = ["--orchestrator.group-size", "4"]
    start(read(path, words), make_newer(stand_in(PRINT_ARGUMENTS)), words)
    argv = last_json(tmp_path / "outputs" / "r" / "configs" / LOG)["argv"]
    assert argv == ["@", str(path), "--orchestrator.train.group-size", "4"]


def test_pinned_checkout_gets_options_with_pinned_names(run_file, stand_in, tmp_path):
    path, words = run_file(), ["--orchestrator.train.group-size", "2"]
    start(read(path, words), stand_in(PRINT_ARGUMENTS), words)
    assert last_json(tmp_path / "outputs" / "r" / LOG)["argv"] == ["@", str(path), "--orchestrator.group-size", "2"]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--trainer.model.lora.target-modules", "a", "b"], "trainer.model.lora.target_modules", ["a", "b"]),
        (["--ckpt", '{"interval": 3}'], "ckpt.interval", 3),
        (["--monitors.wandb.group=g"], "monitors.wandb.group", "g"),
    ],
)
def test_copy_has_options_that_prime_rl_cannot_read(run_file, stand_in, tmp_path, words, key, value):
    words = ["--max-steps", "3", *words]
    start(read(run_file(), words), stand_in(PRINT_ARGUMENTS), words)
    copy = tmp_path / "outputs" / "r" / "configs" / "harbortrainer.toml"
    assert last_json(tmp_path / "outputs" / "r" / LOG)["argv"] == ["@", str(copy)]
    data = tomllib.loads(copy.read_text())
    assert (lookup(data, key), data["max_steps"]) == (value, 3)


def test_pinned_checkout_gets_pinned_key_names(run_file, stand_in, tmp_path):
    path = with_newer_keys(run_file())
    start(read(path), stand_in(PRINT_ARGUMENTS), [])
    data = tomllib.loads(Path(last_json(tmp_path / "outputs" / "r" / LOG)["argv"][1]).read_text())
    assert data["orchestrator"]["group_size"] == 4
    assert data["trainer"]["loss"] == {"type": "ipo", "ipo_threshold": 0.3, "kl_tau": 0.0}


def test_records_provenance_and_checks_it_on_resume(run_file, stand_in, tmp_path):
    task = make_task(tmp_path / "tasks" / "one")
    path, checkout = run_file(tasks=tmp_path / "tasks"), stand_in(PRINT_ARGUMENTS)
    start(read(path), checkout, [])
    made_of = Provenance.model_validate_json((tmp_path / "outputs/r/configs/made_of.json").read_text())
    ((source, tasks),) = made_of.tasks.items()
    assert tasks == {"one": load_task(task).key}
    assert made_of.origins[source].source == str(tmp_path / "tasks")
    assert start(read(path), checkout, [], resume=True) == 0
    (task / "instruction.md").write_text("Do something else.")
    with pytest.raises(UserError, match="have changed since this run was started: one differs"):
        start(read(path), checkout, [], resume=True)


def test_clean_deletes_earlier_run_first(run_file, stand_in, tmp_path):
    old = tmp_path / "outputs" / "r" / "checkpoints"
    old.mkdir(parents=True)
    start(read(run_file("clean = true")), stand_in(PRINT_ARGUMENTS), [])
    assert not old.exists()
    assert last_json(tmp_path / "outputs" / "r" / LOG)["argv"][-1] == "--no-clean"


def test_clean_deletes_checkpoints_outside_of_the_folder(run_file, stand_in, tmp_path):
    """Otherwise Prime-RL refuses the start, as `validate_run_dir` of pathing.py sees them."""
    (tmp_path / "disk" / "checkpoints" / "step_3" / "trainer").mkdir(parents=True)
    (tmp_path / "disk" / "notes.txt").write_text("of the user")
    path = run_file(f'clean = true\n[ckpt]\noutput_dir = "{tmp_path}/disk"')
    start(read(path), stand_in(PRINT_ARGUMENTS), [])
    assert [file.name for file in (tmp_path / "disk").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"clean": True}])
def test_refuses_folder_in_use(run_file, stand_in, tmp_path, more):
    run_dir, options = tmp_path / "outputs" / "r", dict(more)
    path = run_file("clean = true" if options.pop("clean", False) else "")
    prime_rl = stand_in(WAIT_FOR_SIGNAL.format(exits=True))
    first = start_launcher(path, prime_rl)
    try:
        wait_for_output(first, "ready")
        before = sorted(run_dir.rglob("*"))
        with pytest.raises(UserError, match=f"process {first.pid} on") as refused:
            start(read(path), prime_rl, [], **options)
        assert str(run_dir) in str(refused.value) and sorted(run_dir.rglob("*")) == before, "nothing has changed"
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(30)
    RunLock(run_dir, LOCK).release()


def test_next_start_ends_what_a_killed_launcher_left(run_file, stand_in, tmp_path, capfd):
    label = "import os; print('label', os.environ['HARBORTRAINER_RUN'], os.environ['HARBORTRAINER_OWNER'], flush=True)"
    end_resume = "import sys\nif '--resume' in sys.argv: sys.exit()\n"
    path, rl = run_file(), stand_in(f"{end_resume}{ORPHAN}{label}{WAIT_FOR_SIGNAL.format(exits=True)}")
    process = start_launcher(path, rl)
    assert process.stdout is not None
    words = next(line for line in process.stdout if line.startswith("label")).split()
    assert owner_state(words[2]) == "running"
    process.kill()
    process.communicate(timeout=20)
    assert (words[1], owner_state(words[2])) == (run_label(tmp_path / "outputs/r", LABEL), "ended")
    left = [(one, one.as_dict(["cmdline"])["cmdline"] or []) for one in processes_of(words[1])]  # a zombie has none
    psutil.wait_procs([one for one, command in left if "of this test" not in command], timeout=20)
    (orphan,) = processes_of(words[1])
    assert start(read(path), rl, [], resume=True) == 0
    assert "cleaned up: 1 processes" in capfd.readouterr().err and not orphan.is_running()


def test_reports_child_exit_code_and_last_lines(run_file, stand_in, tmp_path, capfd):
    log = tmp_path / "outputs" / "r" / "logs" / "latest" / "orchestrator.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "MemoryError: no more\n")
    assert start(read(run_file()), stand_in(FAIL), []) == 1
    err = capfd.readouterr().err
    assert "orchestrator ended with exit code 137" in err
    assert str(log) in err and "MemoryError: no more" in err and "line 3\n" not in err


def test_log_has_a_size_limit(run_file, stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "LOG_BYTES", 2000)
    assert start(read(run_file()), stand_in("for n in range(1000): print('line', n)"), []) == 0
    logs = sorted((tmp_path / "outputs/r").glob("job_*"))
    assert [log.name for log in logs] == ["job_rl.1.log", LOG], "Prime-RL refuses other names in a new folder"
    assert all(log.stat().st_size <= 2000 for log in logs)
    lines = "".join(log.read_text() for log in logs).splitlines()
    assert len(lines) > 200 and lines == [f"line {n}" for n in range(1000 - len(lines), 1000)]


def test_run_goes_on_if_nobody_reads_its_output(run_file, stand_in, tmp_path):
    launcher = start_launcher(run_file(), stand_in("for n in range(30000): print('line', n)"))
    wait_for_output(launcher, "line 0")
    assert launcher.stdout is not None
    launcher.stdout.close()
    try:
        launcher.wait(60)
    finally:
        launcher.terminate()
        launcher.wait(30)
    assert (tmp_path / "outputs/r" / LOG).read_text().splitlines()[-1] == "line 29999"


def test_report_reads_the_end_of_a_large_log(tmp_path):
    (log := tmp_path / "orchestrator.log").write_text("line\n" * TAIL_BYTES + "\x1b[31mMemoryError: no more\x1b[0m\n")
    lines = last_lines(log)
    assert lines[-1] == "MemoryError: no more"
    assert len(lines) < TAIL_BYTES / 4


def test_silent_failure_reports_log_path(run_file, stand_in, tmp_path, capfd):
    assert start(read(run_file()), stand_in("import os; print('x'); os.kill(os.getpid(), 9)"), []) == 128 + 9
    err = capfd.readouterr().err
    assert "exit code 137" in err and LOG in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_forwards_signal_once(run_file, stand_in, number):
    process = start_launcher(run_file(), stand_in(WAIT_FOR_SIGNAL.format(exits=True)))
    wait_for_output(process, "ready")
    process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 7
    assert rest.count(f"got {int(number)}") == 1
    assert "ended with exit code" not in rest, "no report if the user stops the run"


def test_kills_child_after_grace(run_file, stand_in):
    process = start_launcher(run_file(), stand_in(WAIT_FOR_SIGNAL.format(exits=False)), grace_s=0.5)
    wait_for_output(process, "ready")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL


def test_second_interrupt_kills_child(run_file, stand_in):
    process = start_launcher(run_file(), stand_in(WAIT_FOR_SIGNAL.format(exits=False)), grace_s=60)
    wait_for_output(process, "ready")
    process.send_signal(signal.SIGINT)
    wait_for_output(process, "got 2")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL


def test_killed_launcher_signals_child(run_file, stand_in, tmp_path):
    process = start_launcher(run_file(), stand_in(WAIT_FOR_SIGNAL.format(exits=True)))
    wait_for_output(process, "ready")
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=20)
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone


def test_ends_leftover_process(run_file, stand_in, capfd):
    before = {process.pid for process in psutil.process_iter()}
    start(read(run_file()), stand_in(ORPHAN), [])
    assert "cleaned up: 1 processes" in capfd.readouterr().err
    leftovers = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and "of this test" in str(p.info)]
    assert not leftovers


def test_without_prime_rl_starts_and_writes_nothing(run_file, tmp_path):
    with pytest.raises(UserError, match="git submodule update"):
        start(read(run_file()), Checkout(tmp_path / "prime-rl"), [])
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ("[warmup]\nfamily = 'x'\n", {}, "needs the embedded engine"),
        ("clean = true\n", {"dry_run": True}, "clean would delete"),
    ],
)
def test_refuses_unsupported_keys(run_file, stand_in, tmp_path, more, options, message):
    with pytest.raises(UserError, match=message):
        start(read(run_file(more)), stand_in(PRINT_ARGUMENTS), [], **options)
    assert not (tmp_path / "outputs").exists()


def test_report_includes_env_server_log(tmp_path):
    log = tmp_path / "logs" / "latest" / "envs" / "train" / "Harbor.log"
    log.parent.mkdir(parents=True)
    log.write_text("boom\n")
    text = report(tmp_path, ["\x1b[31mTrain env server Harbor failed with exit code -9\x1b[0m"], tmp_path / LOG, 1)
    assert "train env server harbor ended with exit code -9" in text and "boom" in text


@pytest.mark.parametrize("name", ["trainer", "eval env server my+tasks:v2"])
def test_report_names_the_child_and_no_command_of_a_trial(tmp_path, name):
    tail = ["WARNING Git command failed with exit code 128", f"Error: {name.capitalize()} failed with exit code 1"]
    assert report(tmp_path, tail, tmp_path / LOG, 1).splitlines()[0] == f"{name} ended with exit code 1"


def test_uses_uv_if_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkout, "find_uv", lambda: "/opt/uv")
    command = checkout.rl_command(Checkout(tmp_path), Path("a.toml"), ["--x", "1"])
    assert command == ["/opt/uv", "run", "--project", str(tmp_path), "--no-sync", "rl", "@", "a.toml", "--x", "1"]
