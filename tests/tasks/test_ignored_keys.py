"""Exactly the task.toml keys that Harbor ignores are reported."""

import tomllib

import pytest
from harbor.models.task import config as harbors

from harbortrainer.tasks.ignored_keys import KNOWN, ignored_keys

MODELS = {
    "agent": harbors.AgentConfig,
    "verifier": harbors.VerifierConfig,
    "collect": harbors.VerifierCollectConfig,
    "environment": harbors.EnvironmentConfig,
    "healthcheck": harbors.HealthcheckConfig,
    "solution": harbors.SolutionConfig,
    "steps": harbors.StepConfig,
}


@pytest.mark.parametrize("table", KNOWN)
def test_known_keys_equal_harbors(table):
    assert set(MODELS[table].model_fields) == KNOWN[table] - {"memory", "storage"}


@pytest.mark.parametrize(("value", "limit"), [("4096", None), ("1.5", None), ('"4096M"', 4096), ('"2G"', 2048)])
def test_harbor_ignores_sizes_without_unit(value, limit):
    config = harbors.TaskConfig.model_validate_toml(f"[environment]\nmemory = {value}\nstorage = {value}")
    assert config.environment.memory_mb == config.environment.storage_mb == limit


@pytest.mark.parametrize(
    ("toml", "ignored"),
    [
        ("[verifier]\ntimeout = 3", ["verifier.timeout"]),
        ('[verifier]\nenviroment_mode = "separate"', ["verifier.enviroment_mode"]),
        ('[[steps]]\nname = "a"\ntimeout_sec = 5\n[[steps]]\nname = "b"\ntimeout_sec = 5', ["steps.timeout_sec"]),
        ('[[steps]]\nname = "a"\n[steps.agent]\ntimeout = 5', ["steps.agent.timeout"]),
        ("[verifier.environment]\nmemory_md = 5", ["verifier.environment.memory_md"]),
        ("[environment.healthcheck]\nretry = 5", ["environment.healthcheck.retry"]),
        ("[environment]\nmemory = 4096", ["environment.memory without a unit (write memory_mb)"]),
        (
            "[verifier.environment]\nstorage = 5.0\nmemory = '1G'",
            ["verifier.environment.storage without a unit (write storage_mb)"],
        ),
        ('[environment]\nmemory = "2G"\n[environment.env]\nANY = "1"', []),
        ('tags = []\n[metadata]\nany = 1\n[notes]\nagent = 1\n[task]\nname = "a/b"\nformat = 1', []),
        ("agent = 5\nsteps = [5]", []),
    ],
)
def test_returns_unknown_keys(toml, ignored):
    assert ignored_keys(tomllib.loads(toml)) == ignored
