"""The plugin module as verifiers finds it."""

import subprocess
import sys

from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import (
    environment_class,
    harness_class,
    load_environment,
    resolve_env_config,
    taskset_class,
)

import harbor_env


def test_importing_the_plugin_imports_no_heavy_package() -> None:
    code = "import sys, harbor_env; print([m for m in ('harbor', 'litellm', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_validating_a_config_imports_no_heavy_package() -> None:
    code = (
        "import sys; from verifiers.v1.utils.loaders import resolve_env_config as r;"
        "r({'taskset': {'id': 'harbor_env'}, 'agent': {'harness': {'environment_type': 'local'}}});"
        "print([m for m in ('harbor', 'litellm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_verifiers_finds_one_class_of_each_kind() -> None:
    assert harbor_env.__all__ == ["HarborEnvironment", "HarborHarness", "HarborTaskset"]
    assert taskset_class("harbor_env") is harbor_env.HarborTaskset
    assert environment_class("harbor_env") is harbor_env.HarborEnvironment
    assert harness_class("harbor_env") is harbor_env.HarborHarness


def test_the_taskset_alone_brings_harness_and_plain_process(sample_tasks: str, caplog) -> None:
    config = resolve_env_config({"taskset": {"id": "harbor_env", "tasks_dir": sample_tasks}})
    environment = load_environment(config)
    assert isinstance(environment, harbor_env.HarborEnvironment)
    assert config.agent_harnesses()["agent"].id == "harbor_env"
    assert isinstance(config.agent.runtime, SubprocessConfig)
    assert "subprocess" not in caplog.text


def test_a_partial_harness_table_keeps_the_plugins_harness() -> None:
    config = resolve_env_config(
        {"taskset": {"id": "harbor_env"}, "agent": {"max_turns": 3, "harness": {"environment_type": "local"}}}
    )
    assert config.agent.harness.id == "harbor_env"
    assert config.agent.harness.environment_type == "local"
    assert config.agent.max_turns == 3
    assert config.agent.runtime.type == "subprocess"
    assert (
        config.agent.retries.model_dump()
        == resolve_env_config({"taskset": {"id": "harbor_env"}}).agent.retries.model_dump()
    )


def test_a_config_survives_the_way_to_a_worker() -> None:
    from verifiers.v1.serve import env_config_data

    config = resolve_env_config(
        {"taskset": {"id": "harbor_env", "include": ["a*"]}, "agent": {"harness": {"n_parallel_envs": 2}}}
    )
    again = resolve_env_config(env_config_data(config))
    assert again.agent.harness.n_parallel_envs == 2
    assert again.taskset.include == ["a*"]
