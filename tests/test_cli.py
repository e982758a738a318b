"""A user's mistake on the command line gives one line and exit code 2, and writes nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from project_folder import write_project

from harbortrainer import __version__
from harbortrainer.cli import main
from harbortrainer.doctor import machine_checks
from harbortrainer.view.index import NAME

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a valid run file, model and task."""
    monkeypatch.chdir(tmp_path)
    return write_project(tmp_path)


def error_line(capfd, *words: str) -> str:
    """Run a command that must fail with a user error; returns its line on stderr."""
    (line,) = error_lines(capfd, *words)
    return line


def error_lines(capfd, *words: str) -> list[str]:
    """Run a command that must fail with user errors; returns its lines on stderr."""
    before = written()
    assert main(words) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), lines
    assert before == written(), "nothing was written"
    return lines


def written() -> dict[Path, int]:
    """Every file below the current folder, without the index of `view`, which is derived from the others."""
    return {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*") if path.is_file() and path.name != NAME}


def edit(old: str, new: str) -> None:
    text = Path("run.toml").read_text()
    assert old in text
    Path("run.toml").write_text(text.replace(old, new))


TRAIN = ("train", "--config", "run.toml", "--engine", "local")


def test_dry_run_of_valid_file_writes_nothing(project, capfd):
    assert main([*TRAIN, "--dry-run"]) == 0
    assert "no problems found; nothing was started" in capfd.readouterr().out
    assert not (project / "outputs").exists()


def test_missing_run_file(project, capfd):
    assert "none.toml: no such file" in error_line(capfd, "train", "--config", "none.toml")


def test_invalid_toml_names_the_line(project, capfd):
    edit("seq_len = 512", "seq_len = = 512")
    assert "line 3" in error_line(capfd, *TRAIN)


def test_unknown_key_gets_a_suggestion(project, capfd):
    edit("seq_len", "seq_length")
    assert "run.toml: seq_length: no such key; did you mean seq_len?" in error_line(capfd, *TRAIN)


def test_unknown_plugin_key_gets_a_suggestion(project, capfd):
    edit('environment_type = "local"', 'environment_type = "local", enviroment_kwargs = {}')
    line = error_line(capfd, *TRAIN)
    assert "orchestrator.train.source[0].env.agent.harness.enviroment_kwargs" in line and "did you mean" in line


def test_unknown_environment_type_lists_the_known(project, capfd):
    edit('"local"', '"podman"')
    line = error_line(capfd, *TRAIN)
    assert "environment_type" in line and "podman" in line and "docker" in line


def test_unknown_environment_type_on_prime_rl(project, capfd):
    edit('"local"', '"podman"')
    assert "podman" in error_line(capfd, "train", "--config", "run.toml", "--engine", "prime-rl")


def test_malformed_task_names_its_file(project, capfd):
    (project / "tasks" / "one" / "task.toml").write_text("version = \n")
    assert "tasks/one/task.toml" in error_line(capfd, *TRAIN)


def test_folder_without_tasks(project, capfd):
    (project / "empty").mkdir()
    edit('tasks_dir = "tasks"', 'tasks_dir = "empty"')
    assert "no tasks here" in error_line(capfd, *TRAIN)
    assert "no tasks here" in error_line(capfd, "tasks", "check", "empty")


def test_failed_fetch_names_file_and_key(project, capfd, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    edit('tasks_dir = "tasks"', f'dataset = "file:///nowhere/r.git@{"a" * 40}"')
    line = error_line(capfd, *TRAIN)
    assert line.startswith("error: run.toml: orchestrator.train.source[0].env.taskset.dataset: file:///nowhere/r.git@")
    assert "does not appear to be a git repository" in line


def test_missing_program_names_its_package(project, capfd, monkeypatch):
    monkeypatch.setattr(machine_checks, "missing_tools", lambda: ["tmux"])
    assert "apt-get install tmux" in error_line(capfd, *TRAIN)


def test_port_in_use(project, capfd):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        assert "is in use" in error_line(capfd, *TRAIN, "--orchestrator.model.client.base-url", url)


def test_model_folder_without_weights(project, capfd):
    (project / "model" / "model.safetensors").unlink()
    assert "no weights in model" in error_line(capfd, *TRAIN)


def test_new_run_in_used_folder(project, capfd):
    (project / "outputs" / "r").mkdir(parents=True)
    (project / "outputs" / "r" / "metrics.jsonl").write_text("{}")
    assert "--resume" in error_line(capfd, *TRAIN)


def test_resume_with_another_config(project, capfd):
    (project / "outputs" / "r").mkdir(parents=True)
    (project / "outputs" / "r" / "config.toml").write_text("seq_len = 4\n")
    assert "outputs/r" in error_line(capfd, *TRAIN, "--resume")


def test_resume_without_a_name(project, capfd):
    edit('name = "r"\n', "")
    assert "--resume needs the name of the run" in error_line(capfd, *TRAIN, "--resume")


def test_resume_without_a_run(project, capfd):
    error_line(capfd, *TRAIN, "--resume")


def test_missing_submodule(project, capfd, monkeypatch):
    monkeypatch.setenv("HARBORTRAINER_PRIME_RL", str(project / "prime-rl"))
    source, gpus = error_lines(capfd, "train", "--config", "run.toml", "--engine", "prime-rl")
    assert "git submodule update --init" in source and "this machine has 0" in gpus


def test_unknown_engine(project, capfd):
    assert "auto, prime-rl, local" in error_line(capfd, "train", "--config", "run.toml", "--engine", "vllm")


def test_misspelled_engine_gets_a_suggestion(project, capfd):
    line = error_line(capfd, "train", "--config", "run.toml", "--engine", "locl")
    assert "--engine: unknown engine 'locl'; did you mean 'local'?" in line


@pytest.mark.parametrize("engine", ["local", "prime-rl"])
def test_all_mistakes_of_a_file_are_reported_at_once(project, capfd, engine):
    edit("seq_len", "seq_length")
    edit("group_size = 2", "group_size = 1")
    edit('tasks_dir = "tasks"', 'tasks_dir = "nowhere"')
    lines = error_lines(capfd, "train", "--config", "run.toml", "--engine", engine)
    assert any("seq_length: no such key" in line for line in lines)
    assert any("env.taskset.tasks_dir: nowhere: no such folder" in line for line in lines)
    assert any("orchestrator.group_size: group_size is 1" in line for line in lines)


def test_refused_key_names_the_remedy(project, capfd):
    assert "--engine prime-rl" in error_line(capfd, *TRAIN, "--trainer.loss.type", "custom")


def test_upgrade_of_missing_file(project, capfd):
    error_line(capfd, "config", "upgrade", "none.toml")


def test_warmup_with_file_without_warmup_table(project, capfd):
    assert "no [warmup]" in error_line(capfd, "warmup", "--config", "run.toml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "nope"], "command line: --from: no such file or folder: nope"),
        (["--from", "nope", "--warmup.run", "other"], "command line: --warmup.run: no such file or folder: other"),
        (["--model", "m", "--tasks", "nope"], "command line: --tasks: no such file or folder: nope"),
        (["--from", "nope", "--tasks", "nope"], "--tasks, --from: two sources of training data; leave one out"),
        (["--config", "run.toml", "--from", "nope"], "--from: this option is for a warm-up without a run file"),
    ],
)
def test_warmup_names_the_option_that_is_wrong(project, capfd, words, message):
    assert message in error_line(capfd, "warmup", *words)


@pytest.mark.parametrize("command", ["list", "prune"])
def test_images_of_a_missing_cache_folder(project, capfd, command):
    line = error_line(capfd, "images", command, "--cache-dir", "missing")
    assert "--cache-dir missing: no such folder" in line and not Path("missing").exists()


def test_warmup_without_training_data(project, capfd):
    assert "--model and --tasks" in error_line(capfd, "warmup")
    line = error_line(capfd, "warmup", "--model", "model", "--tasks", "tasks", "--warmup.stepz", "3")
    assert "--warmup.stepz" in line


@pytest.mark.parametrize(
    "words", [["fly"], ["train"], ["train", "--config"], ["serve", "m", "--port", "x"], ["tasks", "fly"]]
)
def test_parse_errors_are_one_line(project, capfd, words):
    assert "--help" in error_line(capfd, *words)


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_misspelled_agent_is_reported_first(project, capfd, command):
    line = error_line(capfd, command, "no/such/tasks", "--agent", "orcale")
    assert line == "error: --agent: the installed Harbor has no agent 'orcale'; did you mean 'oracle'?"


def test_misspelled_agent_in_run_file_names_file_and_key(project, capfd):
    edit("harness = { ", 'harness = { agent = "terminus2", ')
    line = error_line(capfd, "eval", "tasks", "--model", "model", "--config", "run.toml")
    assert "run.toml: env.agent.harness.agent: the installed Harbor has no agent 'terminus2'" in line
    assert "did you mean 'terminus-2'?" in line


def test_doctor_returns_2_when_red(project, capfd):
    assert main(["doctor", "--config", "run.toml", "--engine", "local"]) == 0
    (project / "model" / "config.json").unlink()
    assert main(["doctor", "--config", "run.toml", "--engine", "local"]) == 2
    assert "red" in capfd.readouterr().out


def test_config_upgrade_writes_current_format(project, capfd):
    Path("old.toml").write_text('[[orchestrator.env]]\nid = "harbor_env"\nargs = { max_turns = 3 }  # few\n')
    assert main(["config", "upgrade", "old.toml"]) == 0
    assert "[[orchestrator.train.source]]" in Path("old.toml").read_text()
    assert "# few" in Path("old.toml.old").read_text()


def test_second_config_upgrade_keeps_the_first_old_file(project, capfd):
    Path("run.toml.old").write_text("# few\n")
    assert "run.toml.old: already exists" in error_line(capfd, "config", "upgrade", "run.toml", "--to", "v0.9")
    assert main(["config", "upgrade", "run.toml", "--to", "v0.9", "--output", "new.toml"]) == 0


@pytest.mark.parametrize("output", ["run.toml", "other.toml"])
def test_config_upgrade_replaces_no_file(project, capfd, output):
    Path("other.toml").write_text("# of the user\n")
    before = Path(output).read_text()
    words = ["config", "upgrade", "run.toml", "--to", "v0.9", "--output", output]
    assert f"{output}: already exists; move it" in error_line(capfd, *words)
    assert Path(output).read_text() == before


@pytest.mark.parametrize("output", ["nowhere/new.toml", "tasks", "run.toml/new.toml"])
def test_config_upgrade_into_impossible_file(project, capfd, output):
    line = error_line(capfd, "config", "upgrade", "run.toml", "--to", "v0.9", "--output", output)
    assert f"{output}: cannot be written (" in line


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["init", "--gpus", "-1"], "--gpus"),
        (["serve", "model", "--port", "x"], "--port"),
        (["train"], "--config"),
        (["init", "--gpu-memory", "inf"], "--gpu-memory"),
        (["images", "prune", "--to", "inf"], "--to"),
        (["tasks", "check", "tasks", "--parallel", "-1"], "--parallel"),
        (["tasks", "audit", "tasks", "--parallel", "0"], "--parallel"),
        (["export", "run", "--sft", "new.jsonl", "--min-reward", "nan"], "--min-reward"),
        (["export", "run", "--public"], "--public"),
        (["serve", "model", "--max-model-len", "0"], "--max-model-len"),
    ],
)
def test_wrong_value_names_its_option(project, capfd, words, name):
    assert name in error_line(capfd, *words).removesuffix("(see --help)")


def test_path_below_a_file_is_one_line(project, capfd):
    (project / "file").write_text("")
    assert "file: " in error_line(capfd, "tasks", "new", "file/x")


def test_run_file_may_begin_with_a_byte_order_mark(project, capfd):
    file = project / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert main(["train", "--config", "run.toml", "--dry-run", "--engine", "local"]) == 0


def test_help_imports_neither_torch_nor_harbor():
    code = (
        "import sys; from harbortrainer.cli import main; main(['--help']); "
        "print(sorted(m for m in ('torch', 'harbor', 'litellm', 'verifiers', 'transformers') if m in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_option(capfd):
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"harbortrainer {__version__}\n"


def test_shell_completion():
    # Shell detection is turned off: a test may run without a shell above it.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | named
    code = "import sys; from harbortrainer.cli import main; sys.exit(main())"
    shown = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", "bash"], capture_output=True, text=True, env=environment
    )
    assert "_harbortrainer_completion" in shown.stdout
    asked = {
        "_HARBORTRAINER_COMPLETE": "complete_bash",
        "COMP_WORDS": "harbortrainer tr",
        "COMP_CWORD": "1",
    }
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment | asked)
    assert words.stdout.split() == ["train"]
    helped = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, env=environment)
    assert "--install-completion" in helped.stdout


def test_runs_as_module_from_a_checkout(project):
    words = [sys.executable, "-m", "src.train", "--config", "none.toml"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none.toml: no such file" in done.stderr


def test_view_checks_folder_and_port(project, capfd):
    for words, said in (
        (("nowhere",), "nowhere: does not exist; pass a run or evaluation folder"),
        (("run.toml",), "is a file, not a run folder"),
    ):
        assert said in error_line(capfd, "view", *words)
    assert "contains no run or evaluation; pass a run or evaluation folder" in error_line(capfd, "view", "tasks")
    for folder in ("outputs/first", "outputs/first/rollouts"):
        Path(folder).mkdir(parents=True)
    Path("outputs/first/config.toml").touch()
    assert "pass one of its runs: first" in error_line(capfd, "view", "outputs", "--export", "run.html")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        for folder in ("outputs", "outputs/first"):
            assert f"port {port}: cannot listen on it" in error_line(capfd, "view", folder, "--port", port)


def test_view_of_damaged_run_or_unwritable_export(project, capfd):
    Path("outputs/first/rollouts").mkdir(parents=True)
    Path("outputs/first/config.toml").touch()
    assert "cannot be written" in error_line(capfd, "view", "outputs/first", "--export", "missing/page.html")
    Path("outputs/first/rollouts/step_1.jsonl").write_text("{half\n")
    assert "step_1.jsonl: the line at byte 0: is not a JSON object" in error_line(
        capfd, "view", "outputs/first", "--port", "0"
    )
