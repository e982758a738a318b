"""Its place puts this folder on the path, so that every test can import the shared fakes by name; and where trials are
played: `local` needs nothing, `container` a Docker daemon."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import costs
import pytest

# Without a network LiteLLM would retry the download of its price list for most of a minute.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# Two threads that wait for each other by spinning made tiny models ten times slower on shared cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# It says where Prime-RL's environment lies too, and here it names the tests' own where a shell set it.
os.environ.pop("UV_PROJECT_ENVIRONMENT", None)
# Tests press Ctrl-C, which whatever a shell started in the background ignores, and its children too.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


WAIT_LONGEST = {"test_plain_install.py", "test_server_access.py", "test_hostile_tasks.py"}
"""Files that start first: each takes minutes, and would run alone at the end."""


def pytest_addoption(parser):
    parser.addoption(
        "--all-mutations",
        action="store_true",
        help="every broken run file and task, not a sample of them",
    )
    parser.addoption(
        "--in-containers",
        action="store_true",
        help="the features of Harbor also in Docker and by Harbor's own trial: half a minute each",
    )
    parser.addoption("--long", action="store_true", help="what is marked `long` or `docker` too")


def pytest_ignore_collect(collection_path, config):
    return costs.is_left_out(collection_path, config.getoption("-m")) or None


def pytest_collection_modifyitems(config, items):
    costs.mark(items)
    items.sort(key=lambda item: item.path.name not in WAIT_LONGEST)
    for item in items:
        if item.get_closest_marker("docker"):
            item.add_marker("long")
    long = [item for item in items if item.get_closest_marker("long")]
    if overlooked := {str(item.path) for item in long if not costs.may_be_long(item.path)}:
        raise pytest.UsageError(f"`-m long` would leave out {sorted(overlooked)}: name the mark in the file itself")
    if not config.getoption("--long"):
        for item in long:
            item.add_marker(pytest.mark.skip(reason="`make test-long` plays it, and pytest with --long"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    costs.enforce(item)
    try:
        return (yield)
    finally:
        costs.enforce(None)


def _why_no_container() -> str:
    """Why no container can run here, empty when one can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for arguments, missing in (
        (["info"], "no Docker daemon answers"),
        (["compose", "version"], "Compose v2 is not installed"),
        (["image", "inspect", "debian:12-slim"], "the image debian:12-slim is not here (and tests pull nothing)"),
    ):
        if subprocess.run(["docker", *arguments], capture_output=True, timeout=60, check=False).returncode:
            return missing
    return ""


@pytest.fixture(autouse=True)
def _lock_of_this_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """renderers keeps one lock a process, which belongs to the first loop that waited for it; each test has its own."""
    if client := sys.modules.get("renderers.client"):
        monkeypatch.setattr(client, "_max_prompt_len_lock", asyncio.Lock(), raising=False)


@pytest.fixture(scope="session")
def container() -> str:
    """The environment type `docker`, where containers can run."""
    if reason := _why_no_container():
        pytest.skip(reason)
    return "docker"


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def environment_type(request: pytest.FixtureRequest) -> str:
    """Both environment types that are examined after a failure, one after the other."""
    return request.getfixturevalue("container") if request.param == "docker" else request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model; a test file may replace it with another model."""
    from tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(folder):
    """Two versions of an adapter for the model in `folder`."""
    from sampler_setup import random_adapter

    return {version: random_adapter(folder, seed=version) for version in (1, 2)}


@pytest.fixture(scope="module")
def reference(folder):
    """What plain transformers compute for the model in `folder`."""
    from sampler_setup import Reference

    return Reference(folder)


@pytest.fixture(scope="module")
def references(folder, adapters):
    """What plain transformers compute under each version; 0 is the model without an adapter."""
    from sampler_setup import Reference

    return {0: Reference(folder)} | {version: Reference(folder, state) for version, state in adapters.items()}
