"""The private API of Harbor's environments exists and has the expected meaning."""

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from pydantic import ValidationError

from harbortrainer.errors import UserError
from harbortrainer.harbor_compat import WRITTEN_FOR, compose_override, open_environment
from harbortrainer.sandbox.docker_environment import DockerSandbox
from harbortrainer.sandbox.local import LocalEnvironment
from harbortrainer.trials.agent import TrainableTerminus2

PRIVATE_APIS = (open_environment.PRIVATE_APIS, compose_override.PRIVATE_APIS)
PLACES = [replace(api, places=(place,)) for api in PRIVATE_APIS for place in api.places]


@pytest.mark.parametrize("api", PLACES, ids=lambda api: api.places[0])
def test_place_exists_as_expected(api):
    api.check()


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: api.used_by)
def test_missing_place_raises_user_error(api):
    gone = "harbor.environments.base:BaseEnvironment._gone"
    message = f"harbor {version('harbor')}: there is no {gone}; {api.used_by} was written for harbor {WRITTEN_FOR}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        replace(api, places=(gone,)).check()


@pytest.fixture
def environment(tmp_path: Path) -> LocalEnvironment:
    """A local environment, not started, with a value for every setting."""
    bind = {"type": "bind", "source": "/data", "target": "/mnt/data", "read_only": True}
    (tmp_path / "environment").mkdir()
    return LocalEnvironment(
        environment_dir=tmp_path / "environment",
        environment_name="test",
        session_id="test",
        trial_paths=TrialPaths(trial_dir=tmp_path / "trial"),
        task_env_config=EnvironmentConfig(cpus=2, memory_mb=300, storage_mb=400, env={"TASK": "1"}),
        network_policy=NetworkPolicy(network_mode=NetworkMode.PUBLIC),
        mounts=[bind, {"type": "bind", "source": "/logs", "target": "/logs/agent"}],
        cache_dir=str(tmp_path / "cache"),
    )


def test_reads_trial_settings_from_harbor(environment):
    changed = f"harbor {version('harbor')} gives an environment other values than harbor {WRITTEN_FOR}: OpenEnvironment"
    assert (environment.memory_mb, environment.cpus, environment.storage_mb) == (300, 2, 400), changed
    assert environment.network_is_public, changed
    assert [(m.source, m.target, m.read_only) for m in environment.bind_mounts] == [
        ("/data", "/mnt/data", True),
        ("/logs", "/logs/agent", False),
    ], changed
    assert environment.writable_targets == ["/logs/agent"], changed
    assert environment.variables_of({"COMMAND": "2"}) == {"TASK": "1", "COMMAND": "2"}, changed
    with environment.with_default_user("worker"):
        assert (environment.user_of(None), environment.user_of("root")) == ("worker", "root"), changed


def test_accepts_fractional_cpus_where_harbor_asks():
    capabilities = LocalEnvironment.resource_capabilities().model_dump()
    assert capabilities.get("fractional_cpus", True)


def test_options_of_our_classes_pass_harbors_check():
    for kind, options in ((TrainableTerminus2, {"max_cut_answers": 2}), (DockerSandbox, {"pids": 512})):
        model = kind.options_model
        if model is None:
            assert tuple(map(int, version("harbor").split(".")[:2])) < (0, 26)
            continue
        assert options.items() <= model.model_validate(options).model_dump().items()
        with pytest.raises(ValidationError, match="Extra inputs"):
            model.model_validate({"max_cut_answer": 2})


def test_constructor_checks_environment_definition(tmp_path):
    with pytest.raises(FileNotFoundError, match="rootfs"):
        LocalEnvironment(
            environment_dir=tmp_path,
            environment_name="test",
            session_id="test",
            trial_paths=TrialPaths(trial_dir=tmp_path / "trial"),
            task_env_config=EnvironmentConfig(),
            rootfs=str(tmp_path / "missing"),
        )
