"""Validation of the plugin's config keys."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.taskset import TasksetConfig

from harbortrainer.config.plugin import VERIFIERS_KEYS
from harbortrainer.environment.plugin_config import HarborEnvConfig, HarborHarnessConfig, HarborTasksetConfig
from harbortrainer.runs.label import TRIALS_DIR_VARIABLE


def test_rollout_details_require_server_url() -> None:
    with pytest.raises(ValidationError, match="needs vllm_base_url"):
        HarborHarnessConfig(capture="rollout_details")


@pytest.mark.parametrize("key", [{"vllm_base_url": "http://localhost:8000/v1"}, {"model_name": "m"}])
def test_ignored_server_url_is_refused(key: dict) -> None:
    with pytest.raises(ValidationError, match="rollout_details"):
        HarborHarnessConfig(**key)


@pytest.mark.skipif("scoring" not in AgentConfig.model_fields, reason="since verifiers 0.4.1")
def test_verifiers_own_grading_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"agent.scoring \(mode\) is not possible.*environment_mode"):
        HarborEnvConfig.model_validate({"agent": {"scoring": {"mode": "isolated"}}})
    dumped = HarborEnvConfig().model_dump(mode="json")
    assert HarborEnvConfig.model_validate(dumped).agent == HarborEnvConfig().agent


def test_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="taks_dir"):
        HarborTasksetConfig.model_validate({"taks_dir": "x"})


def test_trials_folder_follows_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TRIALS_DIR_VARIABLE, raising=False)
    assert HarborHarnessConfig().trials_folder == Path("outputs/trials").resolve()
    monkeypatch.setenv(TRIALS_DIR_VARIABLE, str(tmp_path / "run"))
    assert HarborHarnessConfig().trials_folder == (tmp_path / "run").resolve()
    assert HarborHarnessConfig(trials_dir=tmp_path / "own").trials_folder == (tmp_path / "own").resolve()


def test_every_key_of_verifiers_is_known() -> None:
    for table, fields in {
        "": HarborEnvConfig.model_fields,
        "taskset": TasksetConfig.model_fields,
        "agent": AgentConfig.model_fields,
        "agent.harness": HarnessConfig.model_fields,
    }.items():
        own = {"id"} if table in ("taskset", "agent.harness") else {"max_turns"} if table == "agent" else set()
        assert set(fields) - own <= VERIFIERS_KEYS[table], table
