"""The plugin module as verifiers loads it."""

import subprocess
import sys
from typing import Any

import pytest
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.serve import env_config_data
from verifiers.v1.utils.loaders import (
    environment_class,
    harness_class,
    load_environment,
    resolve_env_config,
    taskset_class,
)

import harbor_env
from harbortrainer.environment.plugin_config import HarborEnvConfig, HarborHarnessConfig


def resolve(env: dict[str, Any]) -> HarborEnvConfig:
    config = resolve_env_config(env)
    assert isinstance(config, HarborEnvConfig)
    return config


def harness_of(config: HarborEnvConfig) -> HarborHarnessConfig:
    assert isinstance(config.agent.harness, HarborHarnessConfig)
    return config.agent.harness


def test_importing_the_plugin_imports_no_heavy_package() -> None:
    code = "import sys, harbor_env; print([m for m in ('harbor', 'litellm', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_validating_a_config_imports_no_heavy_package() -> None:
    code = (
        "import sys; from verifiers.v1.utils.loaders import resolve_env_config as r;"
        "r({'taskset': {'id': 'harbor_env'}, 'agent': {'harness': {'environment_type': 'local'}}});"
        "print([m for m in ('harbor', 'litellm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


_FIRST_REQUESTS = """
import sys
from harbortrainer.environment.environment import import_trial_modules
import_trial_modules("claude-code", renders=False)
loaded = set(sys.modules)
from harbortrainer.environment.model_proxy.server import ROUTES
call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
message = {"role": "assistant", "content": "Done.", "reasoning_content": "Hm.", "tool_calls": [call]}
choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
completion = {"id": "1", "created": 1, "model": "m", "choices": [choice], "usage": usage}
schema = {"type": "object", "properties": {}}
tools = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "ls", "parameters": schema}},
    "/v1/messages": {"name": "ls", "input_schema": schema},
    "/v1/responses": {"type": "function", "name": "ls", "parameters": schema},
}
for path, dialect in ROUTES.items():
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}], "input": "Hello"}
    body |= {"system": "Be brief.", "instructions": "Be brief.", "tools": [tools[path]]}
    dialect.to_chat(body)
    dialect.events(dialect.answer(completion, body), body)
print(sorted(set(sys.modules) - loaded))
"""


def test_first_request_of_each_dialect_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST_REQUESTS], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_verifiers_finds_one_class_of_each_kind() -> None:
    assert harbor_env.__all__ == ["HarborEnvironment", "HarborHarness", "HarborTaskset"]
    assert taskset_class("harbor_env") is harbor_env.HarborTaskset
    assert environment_class("harbor_env") is harbor_env.HarborEnvironment
    assert harness_class("harbor_env") is harbor_env.HarborHarness


def test_taskset_alone_selects_harness_and_runtime(sample_tasks: str, caplog: pytest.LogCaptureFixture) -> None:
    config = resolve({"taskset": {"id": "harbor_env", "tasks_dir": sample_tasks}})
    assert isinstance(load_environment(config), harbor_env.HarborEnvironment)
    assert config.agent_harnesses()["agent"].id == "harbor_env"
    assert isinstance(config.agent.runtime, SubprocessConfig)
    assert "subprocess" not in caplog.text


def test_a_partial_harness_table_keeps_the_plugins_harness() -> None:
    plain = resolve({"taskset": {"id": "harbor_env"}})
    config = resolve(
        {"taskset": {"id": "harbor_env"}, "agent": {"max_turns": 3, "harness": {"environment_type": "local"}}}
    )
    assert (harness_of(config).id, harness_of(config).environment_type) == ("harbor_env", "local")
    assert config.agent.max_turns == 3
    assert config.agent.runtime.type == "subprocess"
    assert config.agent.retries == plain.agent.retries


def test_config_round_trips_to_worker() -> None:
    config = resolve({"taskset": {"id": "harbor_env", "include": ["a*"]}, "agent": {"harness": {"n_parallel_envs": 2}}})
    again = resolve(env_config_data(config))
    assert harness_of(again).n_parallel_envs == 2
    assert again == config


def test_worker_imports_before_first_task(sample_tasks: str) -> None:
    code = f"""
import asyncio, sys
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
environment = load_environment(resolve_env_config({{"taskset": {{"id": "harbor_env", "tasks_dir": {sample_tasks!r}}}}}))
async def main():
    before = "litellm" in sys.modules
    async with environment.serving():
        print(before, "litellm" in sys.modules, "harbor.trial.trial" in sys.modules)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False True True", done.stderr
