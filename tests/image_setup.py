"""Requirements of image tests: a builder, and a local base image, since tests cannot pull."""

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from harbortrainer.runs.locks import waiting_lock
from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.container_engine import PROGRAMS, Program, engine_problem

BASE = "debian:12-slim"


def problem() -> str:
    """Return why buildah cannot build images here; "" if it can."""
    if reason := Buildah.problem():
        return reason
    known = subprocess.run(["buildah", "inspect", "--type", "image", BASE], capture_output=True, check=False)
    return "" if known.returncode == 0 else f"the base image {BASE} is missing (.ci/run builds it)"


SKIP_REASON = problem() if shutil.which("buildah") else "buildah is not installed (.ci/run installs it)"
needs_images = pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON or "-")


def engine_skip_reason(program: Program) -> str:
    """Return why a container engine cannot build images here; "" if it can."""
    if reason := engine_problem(program):
        return reason
    known = subprocess.run([program, "image", "inspect", BASE], capture_output=True, check=False)
    return "" if known.returncode == 0 else f"{program} has no base image {BASE} (.ci/run builds Docker's)"


def engine_marks(program: Program) -> list[pytest.MarkDecorator]:
    """Return the marks of a container engine's tests: skipped where it is not available, and `long` by its kind."""
    missing = pytest.mark.skipif(bool(reason := engine_skip_reason(program)), reason=reason or "-")
    return [missing, pytest.mark.docker if program == "docker" else pytest.mark.long]


ENGINES = [pytest.param(name, marks=engine_marks(name)) for name in PROGRAMS]

SLIM = f"""\
FROM {BASE} AS whole
RUN mkdir -p /slim/bin /slim/tmp /slim/srv && chmod 1777 /slim/tmp \\
 && cp /bin/dash /slim/bin/sh && cp /bin/bash /slim/bin && cp --parents /etc/passwd /etc/group /slim \\
 && for name in bash dash cat ls sleep env id stat mkdir rm rmdir ln chmod chown touch head find wc; do \\
      file=$(readlink -f $(command -v $name)); cp --parents $file $(ldd $file | grep -o '/[^ ]*') /slim; done
FROM scratch
COPY --from=whole /slim /
ENV PATH=/usr/bin:/bin
"""
"""First lines of a Dockerfile with a small image, which is quick to save."""


@contextmanager
def own_podman_store(program: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Keep the other test processes out of podman's store, whose containers do not name the build they belong to."""
    if program == "podman":
        with waiting_lock(tmp_path_factory.getbasetemp().parent / "podman-store.lock"):
            yield
    else:
        yield
