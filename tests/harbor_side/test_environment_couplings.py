"""What we use of the private side of Harbor's environments: it is there, and it means what we take it for."""

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from harbortrainer.errors import UserError
from harbortrainer.harbor_side import WRITTEN_FOR, open_environment, overlaid_docker
from harbortrainer.sandbox.local import LocalEnvironment

COUPLINGS = (open_environment.COUPLINGS, overlaid_docker.COUPLINGS)
PLACES = [replace(couplings, places=(place,)) for couplings in COUPLINGS for place in couplings.places]


@pytest.mark.parametrize("coupling", PLACES, ids=lambda coupling: coupling.places[0])
def test_the_place_is_as_it_was(coupling):
    coupling.check()


@pytest.mark.parametrize("couplings", COUPLINGS, ids=lambda couplings: couplings.used_by)
def test_a_place_that_is_gone_is_told_in_a_sentence(couplings):
    gone = "harbor.environments.base:BaseEnvironment._gone"
    told = f"harbor {version('harbor')}: there is no {gone}; {couplings.used_by} was written for harbor {WRITTEN_FOR}"
    with pytest.raises(UserError, match=f"^{re.escape(told)}"):
        replace(couplings, places=(gone,)).check()


@pytest.fixture
def environment(tmp_path: Path) -> LocalEnvironment:
    """An environment of ours, not started, that was told something of everything."""
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


def test_what_harbor_knows_about_a_trial_is_what_we_read(environment):
    told = f"harbor {version('harbor')} gives an environment other values than harbor {WRITTEN_FOR}: OpenEnvironment"
    assert (environment.memory_mb, environment.cpus, environment.storage_mb) == (300, 2, 400), told
    assert environment.network_is_public, told
    assert [(m.source, m.target, m.read_only) for m in environment.bind_mounts] == [
        ("/data", "/mnt/data", True),
        ("/logs", "/logs/agent", False),
    ], told
    assert environment.writable_targets == ["/logs/agent"], told
    assert environment.variables_of({"COMMAND": "2"}) == {"TASK": "1", "COMMAND": "2"}, told
    with environment.with_default_user("worker"):
        assert (environment.user_of(None), environment.user_of("root")) == ("worker", "root"), told


def test_harbors_constructor_asks_whether_the_environment_can_be(tmp_path):
    with pytest.raises(FileNotFoundError, match="rootfs"):
        LocalEnvironment(
            environment_dir=tmp_path,
            environment_name="test",
            session_id="test",
            trial_paths=TrialPaths(trial_dir=tmp_path / "trial"),
            task_env_config=EnvironmentConfig(),
            rootfs=str(tmp_path / "missing"),
        )
