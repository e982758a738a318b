"""`harbortrainer init` writes a run file that the engines accept, for the tasks, model and machine that it finds."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from finished_run import write_finished_run
from project_folder import write_project
from tiny_model import build_tiny_model
from transformers import AutoTokenizer, Qwen3Config

from harbortrainer.cli import main
from harbortrainer.commands import chosen_policy, chosen_tasks
from harbortrainer.commands.chosen_tasks import SandboxChoice, choose_split
from harbortrainer.config.plugin import plugin_env
from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.reader import load, read
from harbortrainer.config.trainer_table import LoraSettings
from harbortrainer.doctor.gpus import GIB, memory_plan
from harbortrainer.doctor.policy_checks import local_tokenizer
from harbortrainer.engines.memory_plan import MemoryPlan
from harbortrainer.errors import UserError
from harbortrainer.tasks.passed_checks import record_passed
from harbortrainer.tasks.split import SavedSplit, assign_sides
from harbortrainer.tasks.task_folder import load_folder
from harbortrainer.tasks.task_selection import select_tasks

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "datasets/harbor_tasks"
pytestmark = pytest.mark.process


def qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )  # fmt: skip


CONFIGS = {
    "Qwen/Qwen3-1.7B": qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-8B": qwen3(4096, 12_288, 36, 32, tied=False),
    "me/wide": qwen3(4096, 12_288, 1, 32, tied=False),
}
CARDS = {"gpu_16gb.toml": ("Qwen/Qwen3-1.7B", 16), "gpu_48gb.toml": ("Qwen/Qwen3-8B", 48)}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working folder, in which local sandboxes are the only ones."""
    monkeypatch.setattr(chosen_tasks, "_possible_sandboxes", lambda: [SandboxChoice("local", "a reason")])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A hub cache with the configs of some models, without their weights."""
    for name, config in CONFIGS.items():
        config.save_pretrained(tmp_path / f"hub/models--{name.replace('/', '--')}/snapshots/one")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_task(folder: Path, text: str, *, table: str = "", dockerfile: str = "FROM debian:12-slim\n") -> None:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(f'version = "1.0"\n{table}')
    (folder / "instruction.md").write_text(text)
    (folder / "tests/test.sh").write_text(f"# {text}\n")
    (folder / "environment/Dockerfile").write_text(dockerfile)


def error_of(capfd, *words: str) -> str:
    """Run `init`, which must fail with one line and write nothing."""
    before = sorted(Path.cwd().rglob("*"))
    assert main(["init", *words]) == 2
    line = capfd.readouterr().err.strip()
    assert line.startswith("error: ") and "\n" not in line
    assert sorted(Path.cwd().rglob("*")) == before
    return line


def env_of(file: str, kind: str) -> dict:
    return read(file).data["orchestrator"][kind]["source"][0]["env"]


def selected(file: str, kind: str) -> list[str]:
    """Return the tasks that a run with the file takes."""
    env = plugin_env(env_of(file, kind), file=file, key="env")
    assert env is not None
    return [task.name for task in select_tasks(env.taskset).tasks]


def without_split(text: str) -> list[str]:
    """Return the lines, without those that change when the tests of a sample task change, and without alignment."""
    drawn = ("# Qwen", "eval_share", "batch_size", "group_size")
    return [re.sub(" +#", " #", line) for line in text.splitlines() if not line.startswith(drawn)]


def test_sample_tasks_give_a_file_that_the_dry_run_accepts(folder, capfd):
    build_tiny_model(folder / "model")
    assert main(["init", str(SAMPLES), "--model", "model"]) == 0
    lines = capfd.readouterr().out.splitlines()
    commands = [line.split("#")[0].split() for line in lines[lines.index("next:") + 1 :]]
    assert [words[1] for words in commands] == ["tasks", "train", "view"]
    assert main([*commands[1][1:], "--dry-run"]) == 0
    assert "run.toml: no problems found" in capfd.readouterr().out

    trained, held_out = selected("run.toml", "train"), selected("run.toml", "eval")
    assert len(trained) + len(held_out) == 13 and not {*trained} & {*held_out} and 2 <= len(held_out) <= 4
    config = load("run.toml")
    assert config.seq_len == 1024, "what the longest prompt and one command need"
    assert config.orchestrator.batch_size == 8 * config.orchestrator.group_size
    assert config.orchestrator.concurrency.max_inflight == 16


def test_every_key_has_a_short_reason(folder):
    build_tiny_model(folder / "model")
    assert main(["init", str(SAMPLES), "--model", "model"]) == 0
    lines = Path("run.toml").read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\w+ = ", line):
            reason = line.rpartition("  # ")[2] if "  # " in line else before.removeprefix("# ")
            assert 3 < len(reason) <= 90, line
    assert "relative to the folder" not in "".join(lines)  # the samples' path is absolute


def test_existing_file_is_not_overwritten(folder, capfd):
    Path("run.toml").write_text("mine")
    assert error_of(capfd, str(SAMPLES)) == "error: run.toml: already exists; pass another file with --output"
    assert Path("run.toml").read_text() == "mine"
    build_tiny_model(folder / "model")
    assert main(["init", str(SAMPLES), "--model", "model", "--output", "second.toml"]) == 0
    assert load("second.toml").run.name == "second"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such folder; pass a folder of Harbor tasks"),
        (["empty"], "empty: no tasks here; put each task into a sub-folder with a task.toml"),
        ([], "no tasks named, and there is no datasets/harbor_tasks; pass a folder or a source"),
        (["tasks", "--model", "nowhere"], "--model nowhere: no such folder; pass a model folder, or a hub id"),
        (["tasks", "--model", "empty"], "--model empty: no config.json in empty; name the folder of a Hugging Face"),
        (
            ["tasks", "--model", "my run"],
            "--model my run: no config.json in my run; this is a run folder; export its model with"
            " `harbortrainer export 'my run' --merged` and name the export",
        ),
        (["tasks", "--gpus", "999"], "--gpus: this machine has no GPUs; pass --gpu-memory GB too"),
        (["tasks", "--engine", "prime-rl"], "--engine prime-rl: Prime-RL needs 2 GPUs or more, not 0; pass --gpus N"),
        (["tasks", "--engine", "none"], "--engine: unknown engine 'none'; choose one of auto, prime-rl, local"),
        (["tasks", "-o", "none/run.toml"], "none/run.toml: its folder does not exist; create it, or change --output"),
        (["not here"], "not here: none of the 1 tasks can run here (needs-gpu: [environment] gpus = 1); "),
        (["not here"], "; `harbortrainer tasks check 'not here'` checks each task"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(folder, capfd, monkeypatch, words, message):
    monkeypatch.setattr("harbortrainer.commands.init.find_gpus", list)
    write_project(folder)
    (folder / "run.toml").unlink()
    (folder / "empty").mkdir()
    write_finished_run(folder / "my run", folder / "model")
    write_task(folder / "not here/needs-gpu", "use it", table="[environment]\ngpus = 1\n")
    assert message in error_of(capfd, *words)


def test_model_that_does_not_fit_is_refused(folder, hub, capfd):
    line = error_of(capfd, str(SAMPLES), "--model", "me/wide", "--gpus", "1", "--gpu-memory", "3")
    assert "--model me/wide: does not fit; GiB: model 2.68," in line and "use a smaller model" in line


def test_tasks_that_cannot_run_are_left_out_by_name(folder, capfd):
    build_tiny_model(folder / "model")
    for number, word in enumerate(["copy", "sort", "count", "join", "reverse", "merge"]):
        write_task(folder / f"tasks/good-{number}", f"{word} the {word}ed lines of file {number} into {word}.txt")
    write_task(folder / "tasks/gpu[1]", "needs a GPU", table="[environment]\ngpus = 1\n")
    write_task(folder / "tasks/name", "has a bad name", table='[task]\nname = "no-organization"\n')
    (folder / "tasks/broken").mkdir()
    (folder / "tasks/broken/task.toml").write_text("= 1")
    assert main(["init", "tasks", "--model", "model"]) == 0
    output = capfd.readouterr().out
    assert "warning: left out (exclude): 1 task: gpu[1] ([environment] gpus = 1)" in output
    assert "warning: unreadable or duplicates (skip_bad): 2 tasks: " in output
    assert {*selected("run.toml", "train"), *selected("run.toml", "eval")} == {f"good-{n}" for n in range(6)}


def test_remedy_for_tasks_that_access_this_machine_is_printed(folder, capfd):
    build_tiny_model(folder / "model")
    write_task(folder / "tasks/good", "sort the lines")
    write_task(folder / "tasks/judge", "asks a judge", table='[environment.env]\nMY_KEY = "${MY_KEY}"\n')
    assert main(["init", "tasks", "--model", "model"]) == 0
    output = capfd.readouterr().out
    assert "left out (exclude): 1 task: judge (can access this machine: " in output
    assert "if you trust them, delete the file and run `init` again with `--trust NAME`" in output


def test_trusted_tasks_are_in_the_file_and_in_the_next_commands(folder, capfd, monkeypatch):
    build_tiny_model(folder / "model")
    write_task(folder / "tasks/good", "sort the lines")
    write_task(folder / "tasks/judge", "asks a judge", table='[environment.env]\nMY_KEY = "${MY_KEY}"\n')
    assert main(["init", "tasks", "--model", "model", "--trust", "other", "--trust", "jud*"]) == 0
    output = capfd.readouterr().out
    assert "left out" not in output
    assert "harbortrainer tasks check tasks --environment local --trust other --trust 'jud*'" in output
    assert "init tasks --trust other --trust 'jud*' --model model" in Path("run.toml").read_text()
    for side in ("train", "eval"):
        assert env_of("run.toml", side)["agent"]["harness"]["trusted_tasks"] == ["other", "jud*"]
    assert sorted(selected("run.toml", "train") + selected("run.toml", "eval")) == ["good", "judge"]
    monkeypatch.setenv("MY_KEY", "sk-of-the-user")
    assert main(["train", "--config", "run.toml", "--engine", "local", "--dry-run"]) == 0


def test_unchecked_tasks_are_left_out_with_the_command_that_checks_them(folder, capfd):
    build_tiny_model(folder / "model")
    good = [task for task in load_folder(SAMPLES) if task.name[0] < "m"]
    record_passed(good)
    assert main(["init", str(SAMPLES), "--model", "model"]) == 0
    out = capfd.readouterr().out
    assert f"warning: left out (checked_only): {13 - len(good)} tasks not checked, or failed\n" in out
    assert f"  to include them, first run `harbortrainer tasks check {SAMPLES} --environment " in out
    trained, held_out = selected("run.toml", "train"), selected("run.toml", "eval")
    assert sorted(trained + held_out) == [task.name for task in good] and held_out
    assert f"  tasks    {len(trained)} to train on, {len(held_out)} held out" in out
    assert "harbortrainer doctor" in out, "the tasks are checked"


def test_file_written_before_the_check_has_the_key_that_the_next_command_names(folder, capfd):
    build_tiny_model(folder / "model")
    assert main(["init", str(SAMPLES), "--model", "model"]) == 0
    out = capfd.readouterr().out
    (line,) = [line for line in out.splitlines() if "tasks check" in line]
    assert "if a task fails: checked_only = true, twice in run.toml" in line
    file = Path("run.toml")
    assert file.read_text().count("checked_only = false ") == 2
    good = [task for task in load_folder(SAMPLES) if task.name[0] < "m"]
    record_passed(good)
    file.write_text(file.read_text().replace("checked_only = false ", "checked_only = true "))
    trained, held_out = selected("run.toml", "train"), selected("run.toml", "eval")
    assert sorted(trained + held_out) == [task.name for task in good]
    assert main(["train", "--config", "run.toml", "--engine", "local", "--dry-run"]) == 0


def test_single_task_is_also_evaluated(folder, capfd):
    build_tiny_model(folder / "model")
    shutil.copytree(SAMPLES / "csv-clean", "tasks/csv-clean")
    assert main(["init", "tasks", "--model", "model"]) == 0
    assert selected("run.toml", "train") == selected("run.toml", "eval") == ["csv-clean"]
    assert main(["train", "--config", "run.toml", "--engine", "local", "--dry-run"]) == 0


def test_saved_split_without_held_out_tasks_gives_a_file_that_train_accepts(folder, capfd, monkeypatch):
    build_tiny_model(folder / "model")
    shutil.copytree(SAMPLES / "csv-clean", "tasks/csv-clean")
    assert main(["tasks", "split", "tasks", "--eval-share", "0.001", "--write"]) == 0
    assert main(["init", "tasks", "--model", "model"]) == 0
    assert env_of("run.toml", "eval")["taskset"]["may_overlap"] is True
    assert 'split = "train"' in (text := Path("run.toml").read_text()) and "split.json" in text
    assert main(["train", "--config", "run.toml", "--engine", "local", "--dry-run"]) == 0
    monkeypatch.setattr(chosen_tasks, "assign_sides", lambda tasks, split: {task.name: "eval" for task in tasks})
    assert main(["init", "tasks", "--model", "model", "--output", "other.toml"]) == 2
    assert "tasks: its split leaves no task that can run here to train on" in capfd.readouterr().err


def test_warmup_option_teaches_the_training_tasks(folder, capfd):
    build_tiny_model(folder / "model")
    assert main(["init", str(SAMPLES), "--model", "model", "--warmup"]) == 0
    assert "harbortrainer train --config run.toml" in capfd.readouterr().out
    config = load("run.toml")
    assert config.warmup is not None and config.warmup.tasks is None and config.warmup.model == "model"
    harness = config.orchestrator.train.source[0].env["agent"]["harness"]
    assert config.warmup.environment_type == harness["environment_type"]
    assert config.model.name == "warmup" and "init " in (text := Path("run.toml").read_text()) and "--warmup" in text
    assert main(["train", "--config", "run.toml", "--engine", "local", "--dry-run"]) == 0
    message = "error: --warmup: only the embedded engine has a [warmup]"
    assert message in error_of(
        capfd, str(SAMPLES), "--model", "model", "--warmup", "--gpus", "2", "--gpu-memory", "80", "--output", "b.toml"
    )
    write_task(folder / "unsolved/one", "Do it.")
    message = "error: --warmup: the training tasks: no task has a solution/solve.sh"
    assert message in error_of(capfd, "unsolved", "--model", "model", "--warmup", "--output", "b.toml")


def test_run_gets_a_folder_of_its_own(folder):
    build_tiny_model(folder / "model")
    (folder / "outputs/harbor_tasks").mkdir(parents=True)
    assert main(["init", str(SAMPLES), "--model", "model"]) == 0
    assert load("run.toml").run.name == "harbor_tasks-2"


@pytest.mark.parametrize(("name", "context", "agent"), [
    ("me/short-1.7B", 1024, "plain"), ("me/small-135M", 8192, "plain"), ("me/large-1.7B", 8192, None),
])  # fmt: skip
def test_model_that_is_too_small_for_terminus_gets_the_plain_agent(folder, hub, capfd, name, context, agent):
    config = qwen3(512, 1536, 4, 16, tied=True)
    config.max_position_embeddings = context
    config.save_pretrained(hub / f"models--{name.replace('/', '--')}/snapshots/one")
    assert main(["init", str(SAMPLES), "--model", name]) == 0
    assert ("  agent    plain: one shell command" in capfd.readouterr().out) == (agent is not None)
    sampling = tomllib.loads(Path("run.toml").read_text())["orchestrator"]["train"]["sampling"]
    assert sampling["max_completion_tokens"] == (256 if agent else 2048), "a command is short"
    for kind in ("train", "eval"):
        table = env_of("run.toml", kind)["agent"]
        assert (table["max_turns"], table["harness"].get("agent")) == (1 if agent else 20, agent)


def test_small_model_gets_short_samples_and_a_high_rate(folder, hub, capfd):
    config = qwen3(512, 1536, 4, 16, tied=True)
    config.max_position_embeddings = 8192
    config.save_pretrained(hub / "models--me--small-135M/snapshots/one")
    write_task(folder / "tasks/sort", "Sort the words. " * 30)
    write_task(folder / "tasks/copy", "Copy the file.")
    for name in ("sort", "copy"):
        (folder / "tasks" / name / "solution").mkdir()
        (folder / "tasks" / name / "solution/solve.sh").write_text("sort words > sorted\n")
    assert main(["init", "tasks", "--model", "me/small-135M"]) == 0
    run = load("run.toml")
    assert run.seq_len == 512 and run.orchestrator.train.sampling.max_completion_tokens == 32
    assert "samples of up to 512 tokens (the longest prompt and a command of 32 need " in capfd.readouterr().out
    assert 4e-4 <= run.trainer.optim.lr <= 6e-4
    assert main(["train", "--config", "run.toml", "--engine", "local", "--dry-run"]) == 0


@pytest.mark.parametrize("name", ["gpu_16gb.toml", pytest.param("gpu_48gb.toml", marks=pytest.mark.long)])
def test_shipped_gpu_file_is_what_init_writes_and_fits(folder, hub, monkeypatch, name):
    model, gigabytes = CARDS[name]
    plans: list[MemoryPlan | None] = []

    def keep(*arguments) -> MemoryPlan | None:
        plans.append(memory_plan(*arguments))
        return plans[-1]

    monkeypatch.setattr(chosen_policy, "memory_plan", keep)
    (folder / "datasets").mkdir()
    (folder / "datasets/harbor_tasks").symlink_to(SAMPLES)
    (folder / "configs").mkdir()
    words = ["--model", model, "--gpus", "1", "--gpu-memory", str(gigabytes), "--output", f"configs/{name}"]
    assert main(["init", *words]) == 0
    written = Path("configs", name).read_text().replace("a reason", "starts in milliseconds, without a daemon")
    assert without_split(written) == without_split((ROOT / "configs" / name).read_text())

    config, (plan,) = load(ROOT / "configs" / name), plans
    inflight = config.orchestrator.concurrency.max_inflight
    assert plan is not None and inflight is not None and config.lora == LoraSettings()
    assert plan.capacity == int(0.9 * gigabytes * GIB)
    assert plan.memory_error(config.max_model_len, config.seq_len) is None
    assert plan.cache(config.seq_len, config.seq_len) >= inflight * config.seq_len / 2
    longer = config.seq_len + 256
    assert plan.cache(longer, longer) < inflight * longer / 2, "the longest that leaves room for a group"


def test_prime_rl_gets_its_gpus_divided(folder, hub, capfd):
    words = ["--model", "Qwen/Qwen3-8B", "--gpus", "8", "--gpu-memory", "24"]
    assert main(["init", str(SAMPLES), *words]) == 0
    assert "engine   prime-rl (for 8 GPUs)" in capfd.readouterr().out
    run = prime_run(read("run.toml"))
    assert (run.deployment.num_train_gpus, run.deployment.num_infer_gpus) == (2, 6)
    assert run.inference is not None
    assert run.inference.vllm.max_model_len == run.seq_len == 32_768
    assert run.inference.vllm.reasoning_parser == "qwen3"


def test_unreachable_hub_gives_estimated_lengths(folder, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    assert main(["init", "nowhere", "--model", "me/mine-0.5B", "--engine", "local"]) == 2
    assert capfd.readouterr().out == "", "an error comes without the warning"
    assert main(["init", str(SAMPLES), "--model", "me/mine-0.5B", "--engine", "local"]) == 0
    assert "lengths are estimated: to have them counted, run `hf download me/mine-0.5B`" in capfd.readouterr().out
    assert load("run.toml").seq_len == 8192
    assert tomllib.loads(Path("run.toml").read_text())["orchestrator"]["renderer"]["name"] == "custom"


def test_tokenizer_outside_the_cache_is_not_requested(hub, monkeypatch):
    requested: list[str] = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda model, **_: requested.append(model))
    assert local_tokenizer("me/mine-0.5B") is local_tokenizer("me/wide") is None
    assert requested == []
    (hub / "models--me--wide/snapshots/one/tokenizer.json").write_text("{}")
    local_tokenizer("me/wide")
    assert requested == ["me/wide"]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 20])
def test_split_holds_out_about_a_fifth(tmp_path, count):
    for number in range(count):
        write_task(tmp_path / f"task-{number}", f"{number} alone: write {number}.txt with {number} lines of {number}")
    tasks = load_folder(tmp_path)
    split = choose_split(tasks, None)
    assert split is not None
    held_out = sum(side == "eval" for side in assign_sides(tasks, split).values())
    assert 1 <= held_out < len(tasks)
    assert abs(held_out - len(tasks) / 5) <= 1.5


def test_saved_split_is_kept_and_near_copies_are_not_split(tmp_path):
    saved = SavedSplit(eval_share=0.4, near_copy=0.9)
    assert choose_split(load_folder(SAMPLES), saved) is saved
    for name in ("a", "b"):
        write_task(tmp_path / name, "the same words", table=f'[metadata]\nnote = "{name}"\n')
    assert choose_split(load_folder(tmp_path), None) is None


def test_new_task_refuses_names_and_folders_that_exist(folder, capfd):
    assert main(["tasks", "new", "mine/first"]) == 0
    assert main(["tasks", "new", "mine/first"]) == 2
    assert "mine/first: already exists; pass a new folder" in capfd.readouterr().err
    assert main(["tasks", "new", "mine/a b"]) == 2
    assert "'a b' is no name that Harbor accepts" in capfd.readouterr().err
    assert [path.name for path in (folder / "mine").iterdir()] == ["first"]
    assert main(["tasks", "new", "other/.."]) == 2
    assert main(["tasks", "new", "a b/first"]) == 0
    assert "harbortrainer tasks check 'a b/first'" in capfd.readouterr().out
    with pytest.raises(UserError):
        load_folder(folder / "mine/first/tests")
