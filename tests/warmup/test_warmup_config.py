"""Validation of `[warmup]`."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from harbortrainer.config.agent_table import PLAIN_AGENT
from harbortrainer.config.reader import load
from harbortrainer.config.run_sections import WarmupConfig
from harbortrainer.errors import UserError


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"family": "a.py", "tasks": "b"},
        {"family": "a.py", "success": (0.4, 0.2)},
        {"family": "a.py", "success": (0.0, 0.2)},
        {"family": "a.py", "lora_rank": 8},
        {"tasks": "b", "model": "a", "heldout": "c"},
        {"tasks": "b"},
        {"family": "a.py", "unknown": 1},
        {"family": "a.py", "target": 0.3},
        {"tasks": "b", "model": "a", "target": 0.3, "trials": 0},
        {"tasks": "b", "model": "a", "agent": "codex"},
    ],
)
def test_refuses_invalid_warmup_settings(keys: dict):
    with pytest.raises(ValidationError):
        WarmupConfig.model_validate(keys)


LAPTOP = (Path(__file__).parents[2] / "configs" / "laptop.toml").read_text()
"""It trains the plain agent in the local sandbox, with the image `host`."""
TAUGHT_AGENT = next(line for line in LAPTOP.split("\n") if line.startswith('agent = "plain"'))
TAUGHT_IMAGE = next(line for line in LAPTOP.split("\n") if line.startswith("environment_kwargs"))
SECOND_SOURCE = """
[[orchestrator.train.source]]
name = "second"
env.taskset = { id = "harbor_env", tasks_dir = "more" }
env.agent.harness = { agent = "AGENT", environment_type = "docker" }
"""


def written(folder: Path, *replaced: tuple[str, str], added: str = "") -> Path:
    """Write laptop.toml with other texts."""
    text = LAPTOP
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new, 1)
    (file := folder / "run.toml").write_text(text + added)
    return file


def test_warms_up_as_in_training_by_default(tmp_path: Path):
    harness = 'harness = { agent = "plain", trusted_tasks = ["a"],'
    run = load(
        written(
            tmp_path,
            (TAUGHT_AGENT, ""),
            (TAUGHT_IMAGE, ""),
            ('tasks = "outputs/demo/tasks/train"\n', ""),
            ('harness = { agent = "plain",', harness),
            ('environment_type = "local"', 'environment_type = "auto"'),
        )
    )
    assert run.warmup is not None
    assert (run.warmup.agent, run.warmup.environment_type) == (PLAIN_AGENT, "auto")
    assert (run.warmup.environment_kwargs, run.warmup.trusted_tasks) == ({"image": "host"}, ["a"])
    (file := tmp_path / "resolved.toml").write_text(run.resolved())
    assert load(file).warmup == run.warmup


def test_another_sandbox_gets_none_of_the_training_sandboxs_arguments(tmp_path: Path):
    run = load(written(tmp_path, (TAUGHT_IMAGE, 'environment_type = "docker"')))
    assert run.warmup is not None and run.warmup.environment_kwargs == {}


def test_trust_is_not_passed_on_to_other_tasks(tmp_path: Path):
    run = load(
        written(tmp_path, ('harness = { agent = "plain",', 'harness = { agent = "plain", trusted_tasks = ["*"],'))
    )
    assert run.warmup is not None and run.warmup.trusted_tasks == []


@pytest.mark.parametrize(
    ("replaced", "added", "key", "message"),
    [
        ((TAUGHT_AGENT, 'agent = "terminus-2"'), "", "agent", "another agent than the run trains; set it to 'plain'"),
        ((TAUGHT_AGENT, 'environment_type = "lokal"'), "", "environment_type", "unknown environment type 'lokal'"),
        (("{ max_turns = 1,", "{ max_turns = 3,"), "", "agent", "one answer per trial, but the run has more turns"),
        (('harness = { agent = "plain"', 'harness = { agent = "codex"'), "", "agent", "but the run trains codex"),
        ((TAUGHT_AGENT, ""), SECOND_SOURCE.replace("AGENT", "terminus-2"), "agent", "sources have different agents"),
        (
            ("", ""),
            SECOND_SOURCE.replace("AGENT", "plain"),
            "environment_type",
            "sources have different environment_type",
        ),
    ],
)
def test_refuses_a_contradiction_to_training(
    tmp_path: Path, replaced: tuple[str, str], added: str, key: str, message: str
):
    with pytest.raises(UserError) as caught:
        load(written(tmp_path, replaced, added=added))
    assert f"{tmp_path / 'run.toml'}: warmup.{key}: " in str(caught.value) and message in str(caught.value)


def test_reading_the_config_does_not_import_torch():
    code = "import sys, harbortrainer.config.run_sections, harbortrainer.warmup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
