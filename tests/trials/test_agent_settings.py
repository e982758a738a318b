"""Model name, address and key that each agent gets."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.agents.installed.nemo_agent import NemoAgent
from harbor.models.agent.name import AgentName
from harbor.models.trial.config import AgentConfig
from harbor.utils.env import is_sensitive_env_key
from pydantic import SecretStr, ValidationError

from harbortrainer.config.agent_table import AGENTS, IN_THIS_PROCESS, OWN_SERVICE, UNSUPPORTED_AGENTS, WITHOUT_MODEL
from harbortrainer.config.plugin import HarnessKeys
from harbortrainer.environment.environment import import_trial_modules
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec, agent_model_settings, label, trial_config

NEWER = {"code-puppy", "fabric", "fx", "fx-dev", "junie", "mcode", "muse-code", "opencode-v2", "strands"}
"""Of Harbor 0.24 to 0.26."""
PASSES_ADDRESSES = "base_url" in AgentConfig.model_fields
"""Since Harbor 0.25."""
MODEL = ModelEndpoint(name="Qwen/Qwen3-8B", base_url="http://127.0.0.1:9/v1", api_key=SecretStr("its-own"))


@pytest.mark.parametrize(
    ("agent", "name", "variable"),
    [
        ("mini-swe-agent", "openai/Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
        ("strands", "openai/Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
        ("muse-code", "Qwen/Qwen3-8B", "MUSE_CODE_BASE_URL"),
        ("opencode", "openai/Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
        ("codex", "openai/Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
        ("aider", "openai/openai/Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
        ("claude-code", "Qwen/Qwen3-8B", "ANTHROPIC_BASE_URL"),
        ("harbor.agents.installed.claude_code:ClaudeCode", "Qwen/Qwen3-8B", "ANTHROPIC_BASE_URL"),
        ("inside_agents:UninstallableAgent", "openai/Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
        ("inside_agents:InsideAgent", "Qwen/Qwen3-8B", "OPENAI_BASE_URL"),
    ],
)
def test_agent_gets_model_name_and_address_in_its_format(
    agent: str, name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "e2e"))
    model_name, variables = agent_model_settings(agent).name_and_variables(MODEL)
    assert model_name == name
    assert variables[variable] == MODEL.base_url.removesuffix("/v1" if "ANTHROPIC" in variable else "")
    assert "its-own" in variables.values()


@pytest.mark.parametrize(
    ("agent", "arguments"),
    [
        ("kimi-cli", {"base_url": "http://127.0.0.1:9/v1", "api_key": "its-own"}),
        ("pi", {"model_api": "openai-completions"}),
        ("openclaw", {"thinking": "off"}),
        ("nemo-agent", {"llm_type": "openai"}),
        ("eve", {"auto_env": "false"}),
        ("codex", {}),
    ],
)
def test_harbor_class_gets_extra_arguments(agent: str, arguments: dict[str, str], tmp_path: Path) -> None:
    spec = TrialSpec(task_dir=tmp_path, trials_dir=tmp_path, trial_name="t", agent=agent, model=MODEL)
    assert trial_config(spec).agent.kwargs == arguments
    mine = {"base_url": "http://other/v1", "model_api": "other"}
    assert trial_config(spec.model_copy(update={"agent_kwargs": mine})).agent.kwargs == arguments | mine


def made_by_harbor(agent: str, folder: Path, **kwargs: object) -> BaseInstalledAgent:
    """Harbor's agent of a trial."""
    made = AgentFactory.create_agent_from_config(agent_config_of(agent, folder, **kwargs), logs_dir=folder)
    assert isinstance(made, BaseInstalledAgent)
    return made


def agent_config_of(agent: str, folder: Path, **kwargs: Any) -> AgentConfig:
    """Harbor's config of a trial's agent, with the user's `env`; eve and langgraph want a project of the user's."""
    env = kwargs.pop("env", {})
    if agent not in AgentName.values() and ":" not in agent:
        pytest.skip("of a newer Harbor")
    (folder / "agent").mkdir(exist_ok=True)
    (folder / "graph.py").touch()
    (folder / "package.json").write_text(json.dumps({"dependencies": {"@ai-sdk/gateway": "1"}}))
    (folder / "langgraph.json").write_text(json.dumps({"graphs": {"agent": "./graph.py:graph"}}))
    kwargs |= {"langgraph": {"project_path": str(folder)}, "eve": {"path": str(folder)}}.get(agent, {})
    spec = TrialSpec(task_dir=folder, trials_dir=folder, trial_name="t", agent=agent, agent_kwargs=kwargs, model=MODEL)
    return trial_config(spec.model_copy(update={"agent_env": env})).agent


@pytest.mark.parametrize("agent", AGENTS)
def test_harbor_class_accepts_settings(agent: str, tmp_path: Path) -> None:
    made = made_by_harbor(agent, tmp_path)
    expected = {"swe-agent": ["total_cost_limit", "0"], "openclaw": ["--thinking", "off"]}.get(agent, [])
    assert all(word in made.build_cli_flags() for word in expected)


@pytest.mark.skipif(not PASSES_ADDRESSES, reason="a Harbor without base_url")
@pytest.mark.parametrize("agent", sorted(AGENTS.keys() - {"eve"}))
def test_harbors_own_base_url_agrees_with_variables(agent: str, tmp_path: Path) -> None:
    config = agent_config_of(agent, tmp_path)
    address = MODEL.base_url.removesuffix("/v1") if agent == "claude-code" else MODEL.base_url
    assert getattr(config, "base_url") == address  # noqa: B009 - unknown to older releases
    for given in (config, config.model_copy(update={"base_url": None})):
        made = AgentFactory.create_agent_from_config(given, logs_dir=tmp_path)
        connection = getattr(made, "model_connection")  # noqa: B009
        assert (connection.candidate_base_url, connection.api_key) == (address, "its-own")


@pytest.mark.skipif(not PASSES_ADDRESSES, reason="a Harbor without base_url")
@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("eve", {}),
        ("mini-swe-agent", {"env": {"OPENAI_BASE_URL": "http://other/v1"}}),
        ("muse-code", {"env": {"MUSE_CODE_BASE_URL": "http://other/v1"}}),
        ("kimi-cli", {"base_url": "http://other/v1"}),
        ("strands", {"factory_kwargs": {"model": "my-own"}}),
    ],
)
def test_users_address_and_settings_come_before_base_url(agent: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = agent_config_of(agent, tmp_path, **options)
    assert getattr(config, "base_url") is None  # noqa: B009 - unknown to older releases
    made = AgentFactory.create_agent_from_config(config, logs_dir=tmp_path)
    given = {"http://other/v1"} & {*options.get("env", {}).values(), options.get("base_url")}
    assert given <= {getattr(made, "model_connection").candidate_base_url}  # noqa: B009


def test_nemo_agent_does_not_call_nvidia(tmp_path: Path) -> None:
    made = made_by_harbor("nemo-agent", tmp_path)
    assert isinstance(made, NemoAgent)
    written = yaml.safe_load(made._generate_config_yaml(made._resolve_model_name(), made._resolve_api_key()))
    (model,) = written["llms"].values()
    assert (model["_type"], model["base_url"], model["api_key"]) == ("openai", MODEL.base_url, "its-own")


def test_older_goose_does_not_call_openai() -> None:
    variables = agent_model_settings("goose").name_and_variables(MODEL)[1]
    assert f"{variables['OPENAI_HOST']}/{variables['OPENAI_BASE_PATH']}" == f"{MODEL.base_url}/chat/completions"


def test_muse_code_does_not_call_meta(tmp_path: Path) -> None:
    connection = made_by_harbor("muse-code", tmp_path).model_connection
    name = "candidate_base_url" if hasattr(connection, "candidate_base_url") else "base_url"  # since Harbor 0.25
    assert (getattr(connection, name), connection.api_key) == (MODEL.base_url, "its-own")


def test_acp_registry_name_is_no_import_path(tmp_path: Path) -> None:
    made = made_by_harbor("acp:opencode", tmp_path)
    assert (made.name(), made.model_name) == ("acp", "openai/Qwen/Qwen3-8B")
    assert {"OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"} <= set(
        agent_model_settings("acp:opencode").name_and_variables(MODEL)[1]
    )
    import_trial_modules("acp:opencode", renders=False)
    with pytest.raises(ValidationError, match="cannot reach the model"):
        HarnessKeys(agent="acp:opencode", environment_type="modal")


def test_vibe_does_not_call_mistral() -> None:
    assert agent_model_settings("vibe").name_and_variables(MODEL)[1]["VIBE_BACKEND"] == "generic"


@pytest.mark.parametrize("agent", [*AGENTS, "inside_agents:InsideAgent"])
def test_values_redacted_by_harbor_are_no_common_words(agent: str) -> None:
    secrets = {
        value
        for name, value in agent_model_settings(agent).name_and_variables(MODEL)[1].items()
        if is_sensitive_env_key(name) and value
    }
    assert "its-own" in secrets
    assert not secrets & {"true", "false", "True", "False", "TRUE", "FALSE", "yes", "no", "0", "1", "null", "None"}


def test_user_subscription_stays_out_of_sandbox() -> None:
    assert agent_model_settings("claude-code").name_and_variables(MODEL)[1]["CLAUDE_CODE_OAUTH_TOKEN"] == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/models/my model;rm -rf", "models/my-model-rm--rf"), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("///", "policy")],
)
def test_label_is_safe_in_shell(name: str, expected: str) -> None:
    assert label(name) == expected


def test_agent_table_lists_harbor_agents() -> None:
    known = set(AGENTS) | set(UNSUPPORTED_AGENTS) | OWN_SERVICE
    assert known - NEWER <= AgentName.values()
    assert known | IN_THIS_PROCESS | WITHOUT_MODEL | {"acp", "terminus", "terminus-1"} >= set(AgentName.values())
    assert not set(AGENTS) & (set(UNSUPPORTED_AGENTS) | OWN_SERVICE | IN_THIS_PROCESS | WITHOUT_MODEL)


@pytest.mark.parametrize(
    ("agent", "kind", "message"),
    [
        ("cursor-cli", "local", "its vendor's own service"),
        ("fx", "docker", "its vendor's own service"),
        ("dspy-rlm", "local", "the environment of the run, not of a trial"),
        ("computer-1", "docker", "shows its model a screen"),
        ("hermes", "local", "the environment of the run, not of a trial"),
        ("cline-cli", "docker", "no model address"),
        ("mini-swe-agent", "modal", "cannot reach the model"),
    ],
)
def test_untrainable_agent_is_refused_before_run(agent: str, kind: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        HarnessKeys(agent=agent, environment_type=kind)
    HarnessKeys(agent="terminus-2", environment_type="modal")
