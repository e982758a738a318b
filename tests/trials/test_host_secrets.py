"""No secret of whoever starts the run gets into a sandbox: Harbor's own agents, in an environment that notes what it is
told."""

import asyncio
import re
from importlib.resources import files
from pathlib import Path
from typing import cast

import pytest
from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.agent.name import AgentName
from harbor.models.task.config import EnvironmentConfig
from pydantic import SecretStr

from harbortrainer.config.agent_table import AGENTS
from harbortrainer.trials.agent_model import told
from harbortrainer.trials.host_secrets import keep_out, without
from harbortrainer.trials.trial_spec import ModelEndpoint

MODEL = ModelEndpoint(name="Qwen/Qwen3-8B", base_url="http://127.0.0.1:4321/v1", api_key=SecretStr("the-trials-key"))
PLAYED = sorted(AGENTS.keys() & {name.value for name in AgentName})
OF_THE_USER = {
    "langgraph": ("project_path", {"langgraph.json": '{"graphs": {"agent": "./agent.py:graph"}}', "agent.py": ""}),
    "eve": (
        "path",
        {"package.json": "{}", "agent.ts": "gateway(", "instructions.md": ""},
    ),
}
"""Agents that are nothing without a folder of the user's: the argument that names it, and what is in it."""


class Noted:
    """An environment in which every command is well, and nothing is there."""

    default_user = None
    session_id = "a trial"
    task_env_config = EnvironmentConfig(workdir="/app")

    def __init__(self) -> None:
        self.told: list[str] = []

    async def exec(self, command: str, cwd: str | None = None, env: dict | None = None, **_: object) -> ExecResult:
        self.told += [command, *(f"{name}={value}" for name, value in (env or {}).items())]
        return ExecResult(stdout="/app\n0\n0\n" if "pwd" in command else "", stderr="", return_code=0)

    async def upload_file(self, source_path: Path, target_path: str, **_: object) -> None:
        self.told.append(await asyncio.to_thread(Path(source_path).read_text, errors="replace"))

    async def upload_dir(self, *_: object, **__: object) -> None: ...

    async def download_file(self, *_: object, **__: object) -> None: ...

    async def download_dir(self, *_: object, **__: object) -> None: ...

    async def is_file(self, *_: object, **__: object) -> bool:
        return False

    async def is_dir(self, *_: object, **__: object) -> bool:
        return False


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Whatever name of a secret Harbor's agents mention is set in this process's environment."""
    package = files("harbor.agents.installed")
    texts = [path.read_text() for path in package.iterdir() if path.name.endswith(".py")]
    names = {name for text in texts for name in re.findall(r"""["']([A-Z][A-Z0-9_]{3,})["']""", text)}
    for name in names:
        if re.search("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", name) and not re.search("MAX_|TOKENS|_ENV$|_FILE$", name):
            monkeypatch.setenv(name, f"poison-{name}")
    # Those with which a user of Harbor's has its agents ask a service by subscription.
    home = tmp_path / "home"
    for folder in (".codex", ".claude"):
        (home / folder).mkdir(parents=True)
    (home / ".codex" / "auth.json").write_text('{"tokens": "poison-of-codex"}')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CODEX_FORCE_AUTH_JSON", "1")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    return tmp_path


@pytest.mark.parametrize("name", PLAYED)
async def test_an_agent_hands_no_secret_of_this_process_into_its_sandbox(name: str, poisoned: Path) -> None:
    telling, noted = told(name), Noted()
    environment, arguments = cast("BaseEnvironment", noted), telling.arguments(MODEL)
    model, env = telling.of(MODEL)
    if name in OF_THE_USER:
        argument, contents = OF_THE_USER[name]
        for path, text in contents.items():
            (poisoned / path).write_text(text)
        arguments[argument] = str(poisoned)
    agent = AgentFactory.create_agent_from_name(
        AgentName(name), logs_dir=poisoned, model_name=model, extra_env=env, **arguments
    )
    keep_out(agent, environment, {*env.values(), *arguments.values()})
    await agent.setup(environment)
    installed = len(noted.told)
    await agent.run("do it", environment, AgentContext())
    assert 0 < installed < len(noted.told), "it was set up, and its program started"
    assert [word for word in noted.told if "poison" in word] == []
    assert "exec" not in vars(noted)
    if name == "claude-code":
        assert "ANTHROPIC_BASE_URL=http://127.0.0.1:4321" in noted.told, "and asks the trial's model"


class Resumes:
    """An agent of Harbor's whose `resume` is its `run`, as of most."""

    async def setup(self, environment: Noted) -> None: ...

    async def run(self, environment: Noted) -> None:
        await environment.exec("true", env={"A_SERVICES_TOKEN": "a long secret"})

    async def resume(self, environment: Noted) -> None:
        await self.run(environment)
        await environment.exec("true", env={"A_SERVICES_TOKEN": "a long secret"})


async def test_an_agent_that_resumes_is_told_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SERVICES_TOKEN", "a long secret")
    agent, noted = Resumes(), Noted()
    keep_out(cast("BaseAgent", agent), cast("BaseEnvironment", noted), ())
    await agent.resume(noted)
    assert noted.told == ["true", "true"]
    assert "exec" not in vars(noted)


def test_a_secret_is_left_out_under_any_name_and_what_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SERVICES_TOKEN", "a long secret")
    monkeypatch.setenv("SHORT_KEY", "1")
    monkeypatch.setenv("MY_KEY", "asked for by name")
    env = {"OTHER": "a long secret", "SHORT_KEY": "1", "FLAG": "1", "MY_KEY": "asked for by name", "PLACE": "/app"}
    assert without(env, {"asked for by name"}) == {"FLAG": "1", "MY_KEY": "asked for by name", "PLACE": "/app"}


@pytest.mark.parametrize("value", ['{"token": "a-long-secret"}', "https://me:a-long-secret@host/x", "a-long-secret\n"])
def test_a_secret_inside_of_a_longer_value_is_left_out(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("A_SERVICES_TOKEN", "a-long-secret")
    assert without({"SETTINGS": value, "PLACE": "/app"}, ()) == {"PLACE": "/app"}
    assert without({"SETTINGS": value}, {value}) == {"SETTINGS": value}, "it was asked for by name"
    assert without({"MORE": f"[{value}]"}, {value}) == {"MORE": f"[{value}]"}, "and told of it already"


def test_what_is_short_may_stand_in_a_longer_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PASSWORD", "production")
    env = {"TEXT": "a build for production", "OTHER": "production"}
    assert without(env, ()) == {"TEXT": "a build for production"}
    assert without({"A_PASSWORD": "production"}, {"for production"}) == {}
