"""Measure how fast a sandbox starts from an image, and how much disk images take; compare with Docker if installed.

    python benchmarks/images.py                   about two minutes on an idle machine; as root, with buildah
    python benchmarks/images.py --starts 50 --tasks 5

Figures:

- start and stop of a sandbox from a built image, and of one on the host's root
- second build of an unchanged image with four steps
- tasks with a common prefix: seconds to build all of them, and bytes in the store; for Docker, the seconds of
  `docker build` and the steps that it keeps
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.image_cache import ImageCache
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.local import LocalEnvironment

_BASE = "debian:12-slim"
_PREFIX = f"FROM {_BASE}\nRUN head -c 20M /dev/urandom > /common\nENV A=1\n"
_MB = 10**6


def task(top: Path, number: int) -> Path:
    """Write the environment folder of a task. All tasks share the first lines of the Dockerfile."""
    folder = top / f"task{number}" / "environment"
    folder.mkdir(parents=True)
    text = f"{_PREFIX}WORKDIR /app\nRUN head -c 100K /dev/urandom > /own{number}\n"
    (folder / "Dockerfile").write_text(text)
    return folder


def sandbox(folder: Path, cache: Path, image: str) -> LocalEnvironment:
    """Return a task's sandbox, not started."""
    return LocalEnvironment(
        environment_dir=folder,
        environment_name="bench",
        session_id="bench",
        trial_paths=TrialPaths(trial_dir=folder.parent / "trial"),
        task_env_config=EnvironmentConfig(),
        network_policy=NetworkPolicy(network_mode=NetworkMode.NO_NETWORK),
        cache_dir=str(cache),
        image=image,
    )


async def starts(folder: Path, cache: Path, image: str, count: int) -> str:
    """Measure starts (until a first command has run) and stops; return the figures as a line."""
    up, down = [], []
    for _ in range(count + 1):
        box, began = sandbox(folder, cache, image), time.perf_counter()
        await box.start(force_build=False)
        await box.exec("true")
        ready = time.perf_counter()
        await box.stop(delete=True)
        up.append(ready - began)
        down.append(time.perf_counter() - ready)
    p50, p90 = statistics.median(up[1:]), statistics.quantiles(up[1:], n=10)[-1]  # without the first, which builds
    stop = statistics.median(down)
    return f"start and a command p50 {p50 * 1e3:.0f} ms, p90 {p90 * 1e3:.0f} ms; stop {stop * 1e3:.0f} ms"


async def prefix(folders: list[Path], cache: Path) -> str:
    """Build all tasks concurrently, as trials do; return seconds and megabytes as a line."""
    began = time.perf_counter()
    boxes = [sandbox(folder, cache, "build") for folder in folders]
    await asyncio.gather(*(box.start(force_build=False) for box in boxes))
    took = time.perf_counter() - began
    await asyncio.gather(*(box.stop(delete=True) for box in boxes))
    return f"{took:.1f} s, {ImageCache(Store(cache)).size() / _MB:.1f} MB above the base image"


async def second_build(folder: Path, cache: Path) -> str:
    """Build the same Dockerfile again, from buildah's cache; return the seconds as a line."""
    builder, times = Buildah(Store(cache).own / "buildah"), []
    for _ in range(4):
        began = time.perf_counter()
        await builder.build(folder, "localhost/harbortrainer/bench", 600)
        times.append(time.perf_counter() - began)
    return f"{statistics.median(times[1:]):.2f} s"


def docker(*arguments: str) -> str:
    """Return the output of a docker command."""
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def docker_prefix(folders: list[Path]) -> str:
    """Build the same tasks with Docker, one after the other; return the figures as a line."""
    names = [f"harbortrainer-bench:{index}" for index in range(len(folders))]
    began = time.perf_counter()
    for name, folder in zip(names, folders, strict=True):
        docker("build", "-q", "-t", name, str(folder))
    took, began = time.perf_counter() - began, time.perf_counter()
    docker("build", "-q", "-t", names[0], str(folders[0]))
    again = time.perf_counter() - began
    layers = {line for name in names for line in docker("history", "-q", "--no-trunc", name).splitlines()}
    docker("rmi", *names)
    return f"{took:.1f} s for {len(names)} tasks ({len(layers)} steps kept), the second build {again:.2f} s"


async def main(count: int, tasks: int) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as name:
        top, cache = Path(name), Path(name) / "cache"
        folders = [task(top, number) for number in range(tasks)]
        print(f"{tasks} tasks with one prefix, built at once: {await prefix(folders, cache)}")
        print(f"second build:  {await second_build(folders[0], cache)}")
        print(f"image:         {await starts(folders[0], cache, 'build', count)}")
        print(f"host's root:   {await starts(folders[0], cache, 'host', count)}")
        if shutil.which("docker"):
            print(f"docker build:  {docker_prefix(folders)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=20)
    chosen = parser.parse_args()
    asyncio.run(main(chosen.starts, chosen.tasks))
