"""The command line: one clear line, exit code 2 and nothing written for every mistake of the user's."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from workplace import lay_out

from harbortrainer import __version__
from harbortrainer.cli import main
from harbortrainer.doctor import machine
from harbortrainer.view.index_file import NAME

ROOT = Path(__file__).parents[1]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a run file, a model and a task that are all fine."""
    monkeypatch.chdir(tmp_path)
    return lay_out(tmp_path)


def told(capfd, *words: str) -> str:
    """Run a command that must fail as a user's mistake; what it said on stderr."""
    before = written()
    assert main(words) == 2
    line = capfd.readouterr().err.strip()
    assert line.startswith("error: ") and "\n" not in line, line
    assert before == written(), "nothing is written half"
    return line


def written() -> dict[Path, int]:
    """Every file below the current folder; the index of the pages is made from the others at any time."""
    return {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*") if path.is_file() and path.name != NAME}


def edit(old: str, new: str) -> None:
    text = Path("run.toml").read_text()
    assert old in text
    Path("run.toml").write_text(text.replace(old, new))


TRAIN = ("train", "--config", "run.toml", "--engine", "local")


def test_a_dry_run_of_a_fine_file_says_so_and_writes_nothing(workplace, capfd):
    assert main([*TRAIN, "--dry-run"]) == 0
    assert "fine; nothing was started" in capfd.readouterr().out
    assert not (workplace / "outputs").exists()


def test_a_missing_file_is_told(workplace, capfd):
    assert "none.toml: no such file" in told(capfd, "train", "--config", "none.toml")


def test_a_broken_file_is_told_with_the_line(workplace, capfd):
    edit("seq_len = 512", "seq_len = = 512")
    assert "line 3" in told(capfd, *TRAIN)


def test_a_key_that_does_not_exist_is_told_with_the_nearest(workplace, capfd):
    edit("seq_len", "seq_length")
    assert "run.toml: seq_length: no such key; did you mean seq_len?" in told(capfd, *TRAIN)


def test_a_key_of_the_plugin_that_does_not_exist_is_told(workplace, capfd):
    edit('environment_type = "local"', 'environment_type = "local", enviroment_kwargs = {}')
    line = told(capfd, *TRAIN)
    assert "orchestrator.train.source[0].env.agent.harness.enviroment_kwargs" in line and "did you mean" in line


def test_an_unknown_environment_type_is_told_with_those_there_are(workplace, capfd):
    edit('"local"', '"podman"')
    line = told(capfd, *TRAIN)
    assert "environment_type" in line and "podman" in line and "docker" in line


def test_an_unknown_provider_is_told_for_prime_rl_too(workplace, capfd):
    edit('"local"', '"podman"')
    assert "podman" in told(capfd, "train", "--config", "run.toml", "--engine", "prime-rl")


def test_a_malformed_task_is_told_with_its_file(workplace, capfd):
    (workplace / "tasks" / "one" / "task.toml").write_text("version = \n")
    assert "tasks/one/task.toml" in told(capfd, *TRAIN)


def test_a_folder_without_tasks_is_told(workplace, capfd):
    (workplace / "empty").mkdir()
    edit('tasks_dir = "tasks"', 'tasks_dir = "empty"')
    assert "no tasks here" in told(capfd, *TRAIN)
    assert "no tasks here" in told(capfd, "tasks", "check", "empty")


def test_a_run_that_cannot_have_its_tasks_names_file_and_key(workplace, capfd, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    edit('tasks_dir = "tasks"', f'dataset = "file:///nowhere/r.git@{"a" * 40}"')
    line = told(capfd, *TRAIN)
    assert line.startswith("error: run.toml: orchestrator.train.source[0].env.taskset.dataset: file:///nowhere/r.git@")
    assert "does not appear to be a git repository" in line


def test_a_missing_system_tool_is_told_with_its_package(workplace, capfd, monkeypatch):
    monkeypatch.setattr(machine, "missing_tools", lambda: ["tmux"])
    assert "apt-get install tmux" in told(capfd, *TRAIN)


def test_a_port_in_use_is_told(workplace, capfd):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        assert "is in use" in told(capfd, *TRAIN, "--orchestrator.model.client.base-url", url)


def test_a_model_folder_without_weights_is_told(workplace, capfd):
    (workplace / "model" / "model.safetensors").unlink()
    assert "no weights in model" in told(capfd, *TRAIN)


def test_a_new_run_in_a_folder_that_is_taken_is_told(workplace, capfd):
    (workplace / "outputs" / "r").mkdir(parents=True)
    (workplace / "outputs" / "r" / "metrics.jsonl").write_text("{}")
    assert "--resume" in told(capfd, *TRAIN)


def test_a_resume_from_a_folder_of_another_run_is_told(workplace, capfd):
    (workplace / "outputs" / "r").mkdir(parents=True)
    (workplace / "outputs" / "r" / "config.toml").write_text("seq_len = 4\n")
    assert "outputs/r" in told(capfd, *TRAIN, "--resume")


def test_a_resume_of_nothing_is_told(workplace, capfd):
    told(capfd, *TRAIN, "--resume")


def test_a_missing_submodule_is_told(workplace, capfd, monkeypatch):
    monkeypatch.setenv("HARBORTRAINER_PRIME_RL", str(workplace / "prime-rl"))
    line = told(capfd, "train", "--config", "run.toml", "--engine", "prime-rl")
    assert "git submodule update --init" in line


def test_an_unknown_engine_is_told(workplace, capfd):
    assert "auto, prime-rl, local" in told(capfd, "train", "--config", "run.toml", "--engine", "vllm")


def test_a_refused_key_is_told_with_what_to_do(workplace, capfd):
    assert "--engine prime-rl" in told(capfd, *TRAIN, "--trainer.loss.type", "ipo")


def test_an_upgrade_of_a_file_that_is_not_there_is_told(workplace, capfd):
    told(capfd, "config", "upgrade", "none.toml")


def test_a_warm_up_of_a_file_without_one_is_told(workplace, capfd):
    assert "no [warmup]" in told(capfd, "warmup", "--config", "run.toml")


def test_a_warm_up_without_anything_to_learn_from_is_told(workplace, capfd):
    assert "--model and --tasks" in told(capfd, "warmup")
    line = told(capfd, "warmup", "--model", "model", "--tasks", "tasks", "--warmup.stepz", "3")
    assert "--warmup.stepz" in line


@pytest.mark.parametrize(
    "words", [["fly"], ["train"], ["train", "--config"], ["serve", "m", "--port", "x"], ["tasks", "fly"]]
)
def test_words_that_are_no_command_are_told_in_one_line(workplace, capfd, words):
    assert "--help" in told(capfd, *words)


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_a_mistyped_agent_is_told_before_anything_is_looked_for(workplace, capfd, command):
    line = told(capfd, command, "no/such/tasks", "--agent", "orcale")
    assert line == "error: --agent: the Harbor of here has no agent 'orcale'; write 'oracle'"


def test_an_evaluation_by_a_run_file_with_a_mistyped_agent_names_file_and_key(workplace, capfd):
    edit("harness = { ", 'harness = { agent = "terminus2", ')
    line = told(capfd, "eval", "tasks", "--model", "model", "--config", "run.toml")
    assert "run.toml: env.agent.harness.agent: the Harbor of here has no agent 'terminus2'" in line
    assert "write 'terminus-2'" in line


def test_the_doctor_is_red_with_exit_code_2(workplace, capfd):
    assert main(["doctor", "--config", "run.toml", "--engine", "local"]) == 0
    (workplace / "model" / "config.json").unlink()
    assert main(["doctor", "--config", "run.toml", "--engine", "local"]) == 2
    assert "red" in capfd.readouterr().out


def test_config_upgrade_writes_todays_spelling(workplace, capfd):
    Path("old.toml").write_text('[[orchestrator.env]]\nid = "harbor_env"\nargs = { max_turns = 3 }  # few\n')
    assert main(["config", "upgrade", "old.toml"]) == 0
    assert "[[orchestrator.train.source]]" in Path("old.toml").read_text() and "# few" in Path("old.toml").read_text()
    assert Path("old.toml.old").exists()


def test_help_is_quick_and_imports_neither_torch_nor_harbor():
    code = (
        "import sys; from harbortrainer.cli import main; main(['--help']); "
        "print(sorted(m for m in ('torch', 'harbor', 'litellm', 'verifiers', 'transformers') if m in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1, "half a second on an idle machine"


def test_the_release_is_told(capfd):
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"harbortrainer {__version__}\n"


def test_the_shell_can_complete_words():
    # The shell is named, not looked for among the processes above: a test may run under none.
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


def test_it_runs_from_a_checkout_as_a_module(workplace):
    words = [sys.executable, "-m", "src.train", "--config", "none.toml"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none.toml: no such file" in done.stderr


def test_what_is_no_run_and_a_port_in_use_are_told_before_a_page_is_served(workplace, capfd):
    for words, said in ((("nowhere",), "nowhere: is not there"), (("run.toml",), "is a file, not the folder of a run")):
        assert said in told(capfd, "view", *words)
    assert "holds no run and no evaluation; name the folder of a run" in told(capfd, "view", "tasks")
    for folder in ("outputs/first", "outputs/first/rollouts"):
        Path(folder).mkdir(parents=True)
    Path("outputs/first/config.toml").touch()
    assert "name one of its runs: first" in told(capfd, "view", "outputs")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        assert f"port {port}: cannot be listened on" in told(capfd, "view", "outputs/first", "--port", port)


def test_a_damaged_run_and_a_file_that_cannot_be_written_are_told_by_the_pages(workplace, capfd):
    Path("outputs/first/rollouts").mkdir(parents=True)
    Path("outputs/first/config.toml").touch()
    assert "cannot be written" in told(capfd, "view", "outputs/first", "--export", "missing/page.html")
    Path("outputs/first/rollouts/step_1.jsonl").write_text("{half\n")
    assert "step_1.jsonl: the line at byte 0: cannot be read" in told(capfd, "view", "outputs/first", "--port", "0")
