"""The run files in configs/ hold for both engines: our reading, verifiers' classes, and the pinned Prime-RL's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prime_rl_schema import SCHEMA
from project_folder import write_project

from harbortrainer.cli import main
from harbortrainer.config.orchestrator_config import APPENDING_TEMPLATE
from harbortrainer.config.prime_rl_run import prime_run
from harbortrainer.config.prime_rl_schema import key_errors
from harbortrainer.config.reader import load, read
from harbortrainer.config.trainer_table import IpoLoss
from harbortrainer.doctor import verifiers_config as sources
from harbortrainer.engines.prime_rl import checkout
from harbortrainer.environment.renderers_compat import with_chat_format
from harbortrainer.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
FOR_PRIME_RL = ["harbor_4b.toml", "harbor_8b.toml", "harbor_8b_modal.toml"]
KNOWN = "Qwen/Qwen3-8B"
ENVIRONMENT_TYPES = {"harbor_4b.toml": "local", "harbor_8b.toml": "docker", "harbor_8b_modal.toml": "modal"}
VALIDATE = """
import sys, tomllib, pathlib
from prime_rl.configs.rl import RLConfig
config = RLConfig.model_validate(tomllib.loads(pathlib.Path(sys.argv[1]).read_text()))
harness = config.orchestrator.train.source[0].env.agent.harness
print(type(harness).__name__, harness.environment_type, config.weight_broadcast.type, config.run_dir)
"""


@pytest.mark.parametrize("name", [path.name for path in CONFIGS.glob("*.toml")])
def test_embedded_engine_reads_shipped_config(name):
    config = load(CONFIGS / name)
    assert config.run.name
    assert config.orchestrator.eval is not None, "each has held-out tasks"
    chat_format = with_chat_format(config).orchestrator.renderer
    assert chat_format == APPENDING_TEMPLATE or chat_format["thinking_retention"] == "all", "a trial is one branch"
    sources.check(config, name)


def test_quickstart_needs_no_registry():
    raw = read(CONFIGS / "quickstart.toml")
    sources_of = raw.data["orchestrator"]["train"]["source"] + raw.data["orchestrator"]["eval"]["source"]
    harnesses = [source["env"]["agent"]["harness"] for source in sources_of]
    assert [place["environment_kwargs"] for place in [raw.data["warmup"], *harnesses]] == [{"image": "host"}] * 3


def test_readme_opens_the_folders_that_make_writes():
    readme, makefile = (CONFIGS.with_name(name).read_text() for name in ("README.md", "Makefile"))
    assert "-m src.train --config configs/quickstart.toml --run.name quickstart --clean true" in makefile
    assert "harbortrainer view outputs/quickstart " in readme


@pytest.mark.parametrize("name", FOR_PRIME_RL)
def test_config_has_only_prime_rl_keys(name):
    raw = read(CONFIGS / name)
    assert not list(key_errors(raw.data, name))
    assert raw.get("seed") is None and raw.get("warmup") is None, "Prime-RL has no such keys"
    assert raw.upgraded is None


@pytest.mark.parametrize("name", FOR_PRIME_RL)
def test_config_values_are_consistent(name):
    config = load(CONFIGS / name)
    assert config.max_model_len == config.seq_len
    trial = config.orchestrator.train.source[0].env
    assert trial["agent"]["harness"]["n_parallel_envs"] == config.orchestrator.concurrency.max_inflight
    kept = trial["agent"]["harness"]["environment_kwargs"] if "modal" in name else {"sandbox_timeout_secs": 10**6}
    assert kept["sandbox_timeout_secs"] > trial["timeout"]["episode"]
    assert trial["agent"]["harness"]["agent_kwargs"]["interleaved_thinking"]


@pytest.mark.parametrize("name", FOR_PRIME_RL)
@pytest.mark.skipif(not SCHEMA.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_pinned_prime_rl_accepts_config(name):
    path = os.pathsep.join([str(SCHEMA), str(checkout.SOURCE)])
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, str(CONFIGS / name)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[:3] == ["HarborHarnessConfig", ENVIRONMENT_TYPES[name], "filesystem"]


@pytest.mark.parametrize("name", FOR_PRIME_RL)
def test_step_has_at_least_eight_groups_of_sixteen(name):
    orchestrator = load(CONFIGS / name).orchestrator
    assert orchestrator.group_size == 16 and orchestrator.batch_size // orchestrator.group_size >= 8
    assert read(CONFIGS / name).get("inference.vllm.reasoning_parser") == "qwen3"


@pytest.mark.parametrize("name", FOR_PRIME_RL)
def test_loss_is_named_and_has_no_kl_term(name):
    loss = load(CONFIGS / name).trainer.loss
    assert isinstance(loss, IpoLoss) and (loss.eps, loss.kl_tau) == (0.1, 0)


@pytest.mark.skipif(not SCHEMA.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_choices_in_comments_are_valid(tmp_path):
    text = (CONFIGS / "harbor_8b.toml").read_text()
    text = text.replace('type = "grpo" ', '# type = "grpo" ')
    for choice in ('type = "echo"', "roles = {"):
        assert f"# {choice}" in text
        text = text.replace(f"# {choice}", choice)
    chosen = tmp_path / "chosen.toml"
    chosen.write_text(text)
    code = VALIDATE.replace(
        "print(type(harness)",
        "algo, gates = config.orchestrator.algo, "
        "config.orchestrator.train.source[0].curriculum.gates\nprint(algo.type, algo.roles.user.alpha, "
        "gates['signal'].type, type(harness)",
    )
    path = os.pathsep.join([str(SCHEMA), str(checkout.SOURCE)])
    done = subprocess.run(
        [sys.executable, "-c", code, str(chosen)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[:3] == ["echo", "0.05", "advantage_range"], done.stderr[-2000:]
    chosen_here = load(chosen).orchestrator
    assert chosen_here.algo.role_weights == {"user": 0.05}
    curriculum = chosen_here.train.source[0].curriculum
    assert curriculum is not None
    assert curriculum.gates["signal"].reject_max == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("environment_type", "enviroment_type", "environment_type"),
        ("max_turns = 64", 'max_turns = "many"', "orchestrator.train.source[0].env.agent.max_turns"),
        ("max_turns = 64", "max_turns = 0", "agent.max_turns: input should be greater than or equal to 1"),
        (
            'id = "harbor_env", tasks_dir',
            'id = "harbor_en", tasks_dir',
            "no taskset plugin 'harbor_en'; did you mean 'harbor_env'?",
        ),
        ("num_workers", "num_worker", "orchestrator.train.source[0].serve"),
        (
            "max_turns = 64",
            "max_turns = 64\nsampling = { top_p = 0.9 }",
            "source[0].env.agent.sampling: differs from what the learner assumes of training",
        ),
        (
            "max_turns = 64",
            'max_turns = 64\nmodel = "other"',
            "source[0].env.agent.model: differs from what the learner assumes of training",
        ),
        ('thinking_retention = "all"', 'thinking_retention = "some"', "orchestrator.renderer"),
    ],
)
def test_error_in_external_table_names_its_key(tmp_path, old, new, message):
    path = tmp_path / "run.toml"
    text = (CONFIGS / "harbor_8b.toml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError) as caught:
        sources.check(load(path), str(path))
    lines = str(caught.value).splitlines()
    assert message in lines[0] and all(line.startswith(f"{path}: orchestrator.") for line in lines)


def test_mistakes_in_external_tables_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {
        "num_workers": "num_worker",
        'thinking_retention = "all"': 'thinking_retention = "some"',
        "environment_type": "enviroment_type",
    }
    text = (CONFIGS / "harbor_8b.toml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        sources.check(load("run.toml"), "run.toml")
    shown = str(caught.value)
    for kind in ("train", "eval"):
        assert f"run.toml: orchestrator.{kind}.source[0].env.agent.harness.enviroment_type: " in shown, shown
    for key in ("orchestrator.train.source[0].serve.pool", "orchestrator.renderer"):
        assert f"run.toml: {key}" in shown, shown


def test_doctor_reports_missing_tasks_and_mistakes_of_verifiers_tables_at_once(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(write_project(tmp_path))
    text = Path("run.toml").read_text().replace('tasks_dir = "tasks"', 'tasks_dir = "none"')
    Path("run.toml").write_text(text.replace("agent = {", "agent = { max_turn = 3,"))
    assert main(["doctor", "--config", "run.toml", "--engine", "local"]) == 2
    shown = capfd.readouterr().err
    assert "taskset.tasks_dir: none: no such folder" in shown and "env.agent.max_turn: " in shown


@pytest.fixture
def unknown_model(tmp_path):
    """A run file with `auto` and a model whose chat format renderers does not know."""
    path = tmp_path / "run.toml"
    text = (CONFIGS / "harbor_8b.toml").read_text()
    path.write_text(
        text.replace('name = "Qwen/Qwen3-8B"', 'name = "me/mine"')
        .replace('name = "qwen3"', 'name = "auto"')
        .replace('thinking_retention = "all"', "")
    )
    return path


def test_unknown_model_has_its_own_template_on_the_embedded_engine_only(unknown_model):
    run = load(unknown_model)
    sources.check(run, str(unknown_model))
    named = with_chat_format(run)
    assert (run.orchestrator.renderer["name"], named.orchestrator.renderer) == ("auto", APPENDING_TEMPLATE)
    assert named.notes == run.notes
    with pytest.raises(UserError, match="'me/mine' has no known chat format"):
        sources.check(prime_run(read(unknown_model)), str(unknown_model))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--orchestrator.renderer.name", "default"], {"name": "default"}),
        (["--orchestrator.renderer.thinking-retention", "all"], {**APPENDING_TEMPLATE, "thinking_retention": "all"}),
        (["--model.name", KNOWN], {"name": "auto"}),
        (["--warmup.model", KNOWN, "--warmup.tasks", "tasks", "--model.name", "warmup"], {"name": "qwen3"}),
        (["--warmup.model", KNOWN, "--warmup.tasks", "tasks", "--model.name", KNOWN], {"name": "qwen3"}),
        (["--warmup.family", "tasks.py", "--model.name", "warmup"], APPENDING_TEMPLATE),
    ],
)
def test_auto_is_named_by_the_model_that_the_policy_starts_from(unknown_model, overrides, expected):
    assert with_chat_format(load(unknown_model, overrides)).orchestrator.renderer == expected
