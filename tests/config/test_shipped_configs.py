"""The run files in configs/ hold for both engines: our reading, verifiers' classes, and the pinned Prime-RL's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harbortrainer.config import sources
from harbortrainer.config.reader import check_known, read
from harbortrainer.config.runfile import load
from harbortrainer.engines.prime_rl import place
from harbortrainer.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
FOR_PRIME_RL = ["harbor_8b.toml", "harbor_8b_modal.toml"]
VALIDATE = """
import sys, tomllib, pathlib
from prime_rl.configs.rl import RLConfig
config = RLConfig.model_validate(tomllib.loads(pathlib.Path(sys.argv[1]).read_text()))
harness = config.orchestrator.train.source[0].env.agent.harness
print(type(harness).__name__, harness.environment_type, config.weight_broadcast.type, config.run_dir)
"""


@pytest.mark.parametrize("name", [path.name for path in CONFIGS.glob("*.toml")])
def test_the_embedded_engine_reads_it(name):
    config = load(CONFIGS / name)
    assert config.run.name
    assert config.orchestrator.eval is not None, "each has held-out tasks"
    assert config.orchestrator.renderer["thinking_retention"] == "all", "a trial is one branch"
    sources.check(read(CONFIGS / name))


@pytest.mark.parametrize("name", FOR_PRIME_RL)
def test_every_key_of_it_is_prime_rls(name):
    raw = read(CONFIGS / name)
    check_known(raw.data, name)
    assert raw.get("seed") is None and raw.get("warmup") is None, "Prime-RL has no such keys"
    assert raw.upgraded is None


@pytest.mark.parametrize("name", FOR_PRIME_RL)
def test_its_numbers_fit_each_other(name):
    config = load(CONFIGS / name)
    assert config.max_model_len == config.seq_len
    trial = config.orchestrator.train.source[0].env
    assert trial["agent"]["harness"]["n_parallel_envs"] == config.orchestrator.concurrency.max_inflight
    kept = trial["agent"]["harness"]["environment_kwargs"] if "modal" in name else {"sandbox_timeout_secs": 10**6}
    assert kept["sandbox_timeout_secs"] > trial["timeout"]["episode"]
    assert trial["agent"]["harness"]["agent_kwargs"]["interleaved_thinking"]


@pytest.mark.parametrize("name", FOR_PRIME_RL)
@pytest.mark.skipif(not place.find().schema.is_dir(), reason="the submodule prime-rl/ is not populated")
def test_the_pinned_prime_rl_accepts_it(name):
    path = os.pathsep.join([str(place.find().schema), str(place.SOURCE)])
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, str(CONFIGS / name)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kind = "modal" if "modal" in name else "docker"
    assert done.stdout.split()[:3] == ["HarborHarnessConfig", kind, "filesystem"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("environment_type", "enviroment_type", "environment_type"),
        ('environment_type = "docker"', 'environment_type = "dokcer"', "unknown environment type"),
        ("max_turns = 20", 'max_turns = "many"', "orchestrator.train.source[0].env.agent.max_turns"),
        ('id = "harbor_env", tasks_dir', 'id = "harbor_en", tasks_dir', "no such plugin"),
        ("num_workers", "num_worker", "orchestrator.train.source[0].serve"),
        ('thinking_retention = "all"', 'thinking_retention = "some"', "orchestrator.renderer"),
    ],
)
def test_a_mistake_in_the_tables_of_others_is_told_with_its_key(tmp_path, old, new, told):
    path = tmp_path / "run.toml"
    text = (CONFIGS / "harbor_8b.toml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError) as caught:
        sources.check(read(path))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_whose_chat_format_is_not_known_needs_a_renderer(tmp_path):
    path = tmp_path / "run.toml"
    text = (CONFIGS / "harbor_8b.toml").read_text()
    path.write_text(
        text.replace('name = "Qwen/Qwen3-8B"', 'name = "me/mine"').replace('name = "qwen3"', 'name = "auto"')
    )
    with pytest.raises(UserError, match="no known chat format"):
        sources.check(read(path))
