"""Harbor's agents pass no secret of the run's environment into a sandbox; a recording environment checks them."""

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
from harbortrainer.trials.secrets import keep_secrets_out, redact, remove_secrets
from harbortrainer.trials.trial_spec import ModelEndpoint, agent_model_settings

MODEL = ModelEndpoint(name="Qwen/Qwen3-8B", base_url="http://127.0.0.1:4321/v1", api_key=SecretStr("the-trials-key"))
TESTED_AGENTS = sorted(AGENTS.keys() & {name.value for name in AgentName})
USER_FOLDERS = {
    "langgraph": ("project_path", {"langgraph.json": '{"graphs": {"agent": "./agent.py:graph"}}', "agent.py": ""}),
    "eve": (
        "path",
        {"package.json": "{}", "agent.ts": "gateway(", "instructions.md": ""},
    ),
}
"""Agents that need a folder of the user's: the argument that names it, and its files."""


class RecordingEnvironment:
    """An environment without files that records commands, variables and uploads; all commands succeed."""

    default_user = None
    session_id = "a trial"
    task_env_config = EnvironmentConfig(workdir="/app")

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def exec(self, command: str, cwd: str | None = None, env: dict | None = None, **_: object) -> ExecResult:
        self.seen += [command, *(f"{name}={value}" for name, value in (env or {}).items())]
        answers = {"pwd": "/app\n0\n0\n", "CODEX_RUNTIME_ID": "CODEX_RUNTIME_ID 0 0\n"}
        shown = next((answer for word, answer in answers.items() if word in command), "")
        return ExecResult(stdout=shown, stderr="", return_code=0)

    async def upload_file(self, source_path: Path, target_path: str, **_: object) -> None:
        self.seen.append(await asyncio.to_thread(Path(source_path).read_text, errors="replace"))

    async def upload_dir(self, *_: object, **__: object) -> None: ...

    async def download_file(self, *_: object, **__: object) -> None: ...

    async def download_dir(self, *_: object, **__: object) -> None: ...

    async def is_file(self, *_: object, **__: object) -> bool:
        return False

    async def is_dir(self, *_: object, **__: object) -> bool:
        return False


@pytest.fixture
def secret_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set every secret variable that Harbor's agents mention in this process's environment."""
    package = files("harbor.agents.installed")
    texts = [path.read_text() for path in package.iterdir() if path.name.endswith(".py")]
    names = {name for text in texts for name in re.findall(r"""["']([A-Z][A-Z0-9_]{3,})["']""", text)}
    for name in names:
        if re.search("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", name) and not re.search("MAX_|TOKENS|_ENV$|_FILE$", name):
            monkeypatch.setenv(name, f"poison-{name}")
    # Subscription logins that some of Harbor's agents copy into the sandbox.
    home = tmp_path / "home"
    for folder in (".codex", ".claude"):
        (home / folder).mkdir(parents=True)
    (home / ".codex" / "auth.json").write_text('{"tokens": "poison-of-codex"}')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CODEX_FORCE_AUTH_JSON", "1")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    return tmp_path


@pytest.mark.parametrize("name", TESTED_AGENTS)
async def test_agent_passes_no_process_secret_into_sandbox(name: str, secret_environment: Path) -> None:
    settings, recorder = agent_model_settings(name), RecordingEnvironment()
    environment, arguments = cast("BaseEnvironment", recorder), settings.arguments(MODEL)
    model, env = settings.name_and_variables(MODEL)
    if name in USER_FOLDERS:
        argument, contents = USER_FOLDERS[name]
        for path, text in contents.items():
            (secret_environment / path).write_text(text)
        arguments[argument] = str(secret_environment)
    agent = AgentFactory.create_agent_from_name(
        AgentName(name), logs_dir=secret_environment, model_name=model, extra_env=env, **arguments
    )
    keep_secrets_out(agent, environment, {*env.values(), *arguments.values()})
    await agent.setup(environment)
    installed = len(recorder.seen)
    await agent.run("do it", environment, AgentContext())
    assert 0 < installed < len(recorder.seen), "the agent was installed and its program started"
    assert [word for word in recorder.seen if "poison" in word] == []
    assert "exec" not in vars(recorder)
    if name == "claude-code":
        assert "ANTHROPIC_BASE_URL=http://127.0.0.1:4321" in recorder.seen, "and calls the trial's model"


class ResumableAgent:
    """An agent whose `resume` calls its `run`, as most of Harbor's agents do."""

    async def setup(self, environment: RecordingEnvironment) -> None: ...

    async def run(self, environment: RecordingEnvironment) -> None:
        await environment.exec("true", env={"A_SERVICES_TOKEN": "a long secret"})

    async def resume(self, environment: RecordingEnvironment) -> None:
        await self.run(environment)
        await environment.exec("true", env={"A_SERVICES_TOKEN": "a long secret"})


async def test_resumed_agent_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SERVICES_TOKEN", "a long secret")
    agent, recorder = ResumableAgent(), RecordingEnvironment()
    keep_secrets_out(cast("BaseAgent", agent), cast("BaseEnvironment", recorder), ())
    await agent.resume(recorder)
    assert recorder.seen == ["true", "true"]
    assert "exec" not in vars(recorder)


def test_secret_is_removed_under_any_name_and_given_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SERVICES_TOKEN", "a long secret")
    monkeypatch.setenv("SHORT_KEY", "1")
    monkeypatch.setenv("MY_KEY", "requested by name")
    env = {"OTHER": "a long secret", "SHORT_KEY": "1", "FLAG": "1", "MY_KEY": "requested by name", "PLACE": "/app"}
    assert remove_secrets(env, {"requested by name"}) == {"FLAG": "1", "MY_KEY": "requested by name", "PLACE": "/app"}


@pytest.mark.parametrize("value", ['{"token": "a-long-secret"}', "https://me:a-long-secret@host/x", "a-long-secret\n"])
def test_secret_within_longer_value_is_removed(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("A_SERVICES_TOKEN", "a-long-secret")
    assert remove_secrets({"SETTINGS": value, "PLACE": "/app"}, ()) == {"PLACE": "/app"}
    assert remove_secrets({"SETTINGS": value}, {value}) == {"SETTINGS": value}, "it was requested by name"
    assert remove_secrets({"MORE": f"[{value}]"}, {value}) == {"MORE": f"[{value}]"}, "the value was requested"


def test_short_secret_within_longer_value_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PASSWORD", "production")
    env = {"TEXT": "a build for production", "OTHER": "production"}
    assert remove_secrets(env, ()) == {"TEXT": "a build for production"}
    assert remove_secrets({"A_PASSWORD": "production"}, {"for production"}) == {}


@pytest.mark.long
def test_key_is_redacted_in_text_files_of_any_size(tmp_path: Path):
    (tmp_path / "log").write_text("a sk-secret b\nsk-secret")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\0sk-secret")
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"x" * 8192)
        file.seek(1 << 31)
        file.write(b"sk-secret")
    redact(tmp_path, "sk-secret")
    assert (tmp_path / "log").read_text() == "a [REDACTED] b\n[REDACTED]"
    assert (tmp_path / "binary").read_bytes() == b"\0sk-secret"
    assert (tmp_path / "link").is_symlink()
    with (tmp_path / "sparse").open("rb") as file:
        file.seek(1 << 31)
        assert file.read() == b"[REDACTED]"
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("name", ["x" * 250, "log"], ids=["long name", "draft exists"])
def test_files_of_the_agent_never_end_redaction(name: str, tmp_path: Path):
    (tmp_path / name).write_text("a sk-secret b")
    (tmp_path / ".log.redacted").write_text("the agent's")
    (tmp_path / "zz").write_text("sk-secret")
    redact(tmp_path, "sk-secret")
    assert not [path.name for path in tmp_path.iterdir() if "sk-secret" in path.read_text()]
