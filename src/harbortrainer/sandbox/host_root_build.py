"""Builds a task's image without a builder: its Dockerfile's steps run on a root filesystem, in a sandbox.

The changes land in a layer on the disk. The layer is built once per content: its key is a hash of the Dockerfile, its
context, the root filesystem and the building user. Invariants:
- A failed step fails the build; the error names the step and shows the end of its output.
- A layer is complete or absent.
"""

import asyncio
import hashlib
import itertools
import os
import platform
import posixpath
import shlex
import stat
from dataclasses import replace
from pathlib import Path

from harbortrainer.sandbox import archives, dockerfile
from harbortrainer.sandbox import dockerfile as df
from harbortrainer.sandbox.compose_files import compose_files
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.inside.messages import Command, HostView, SandboxSpec
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.running_sandbox import CommandResult, RunningSandbox
from harbortrainer.sandbox.task_image import SMALL_BYTES, SMALL_ENTRIES, Image

_TAIL = 2000


class Builder:
    """Runs the steps of one recipe. `image` is the result so far."""

    def __init__(self, sandbox: RunningSandbox, folder: Path, seconds: float, start: Image) -> None:
        self._sandbox, self._folder, self._seconds = sandbox, folder, seconds
        self.image = replace(start, env=dict(start.env))

    async def run(self, recipe: df.Recipe) -> Image:
        """Run every step in order and return the image."""
        carry_out = {
            "RUN": self._run,
            "COPY": self._copy,
            "ENV": self._env,
            "WORKDIR": self._workdir,
            "USER": self._user,
        }
        for step in recipe.steps:
            try:
                await carry_out[step.name](step.value)
            except SandboxBuildError as error:
                raise SandboxBuildError(f"{step}: {error}") from error
        return self.image

    async def _env(self, value: str) -> None:
        self.image.env |= dict(df.key_values(value, self.image.env))

    async def _user(self, value: str) -> None:
        self.image.user = df.substitute(value, self.image.env)

    async def _workdir(self, value: str) -> None:
        self.image.workdir = self._path(df.substitute(value, self.image.env))
        await self._sh(f"mkdir -p -- {shlex.quote(self.image.workdir)}")

    async def _run(self, value: str) -> None:
        image = self.image
        done = await self._run_limited(
            Command([*image.shell, value], cwd=image.workdir, env=image.env, user=image.user)
        )
        if done.code:
            raise SandboxBuildError(f"failed with exit code {done.code}: {done.tail(_TAIL)}")

    async def _copy(self, value: str) -> None:
        *names, target = df.split_words(value, self.image.env) or [""]
        if not names:
            raise SandboxBuildError("needs a source and a target")
        path = self._path(target)
        is_folder = target.endswith("/") or len(names) > 1 or await self._is_folder(path)
        for source in dockerfile.copy_sources(self._folder, names):
            await self._extract(*_archive(source, path, is_folder=is_folder))

    def _path(self, path: str) -> str:
        """Resolve a path against the current WORKDIR."""
        return posixpath.normpath(posixpath.join(self.image.workdir, path))

    async def _is_folder(self, path: str) -> bool:
        done = await self._sandbox.run(Command(["/bin/sh", "-c", 'test -d "$0"', path], env=self.image.env))
        return done.code == 0

    async def _extract(self, archive: int, folder: str) -> None:
        try:
            done = await self._run_limited(Command(["unpack", folder], call=True), stdin=archive)
        finally:
            os.close(archive)
        if done.code:
            raise SandboxBuildError(done.tail(_TAIL))

    async def _sh(self, command: str) -> None:
        done = await self._sandbox.run(Command(["/bin/sh", "-c", command], env=self.image.env))
        if done.code:
            raise SandboxBuildError(done.tail(_TAIL))

    async def _run_limited(self, command: Command, stdin: int | None = None) -> CommandResult:
        try:
            return await self._sandbox.run(command, stdin=stdin, seconds=self._seconds)
        except TimeoutError as error:
            raise SandboxBuildError(f"did not finish within {self._seconds:.0f} s") from error


def _archive(source: Path, target: str, *, is_folder: bool) -> tuple[int, str]:
    """Pack a file or a folder's content; return the archive and the folder to unpack it into."""
    if source.is_dir():
        return archives.archive(source), target
    path = posixpath.join(target, source.name) if is_folder else target
    return archives.archive(source, posixpath.basename(path)), posixpath.dirname(path)


async def build(
    recipe: df.Recipe,
    folder: Path,
    scratch: Path,
    spec: SandboxSpec,
    view: HostView | None,
    seconds: float,
    start: Image,
) -> None:
    """Build a recipe with the context `folder`: write the layer (`upper`) and the image file into `scratch`."""
    sandbox = await RunningSandbox.start(replace(spec, upper=str(scratch)), view)
    try:
        image = await Builder(sandbox, folder, seconds, start).run(recipe)
    finally:
        await sandbox.stop()
    image.small = await asyncio.to_thread(_is_small, scratch / "upper")
    image.save(scratch)


def _is_small(layer: Path) -> bool:
    entries = list(itertools.islice(layer.rglob("*"), SMALL_ENTRIES + 1))
    size = sum(info.st_size for path in entries if not stat.S_ISDIR((info := path.lstat()).st_mode))
    return len(entries) <= SMALL_ENTRIES and size <= SMALL_BYTES


_VERSION = "4"


async def build_image(
    folder: Path, store: Store, spec: SandboxSpec, view: HostView | None, seconds: float, start: Image
) -> Image:
    """Return the image of the Dockerfile in `folder`, built at most once; `start` if there is no Dockerfile.

    Args:
        spec: The sandbox that builds.
        view: Its view of the host, as for `RunningSandbox.start`.
        seconds: Time limit of one step.
        start: The image to start from, with the root filesystem's variables.

    Raises:
        SandboxBuildError: A step failed or is not supported; the message names it.
    """
    if not (folder / "Dockerfile").is_file():
        return start
    recipe = dockerfile.parse(dockerfile.read_dockerfile(folder))
    goes_in = [_VERSION, store.flavour, platform.machine(), _identity(Path(spec.rootfs))]
    goes_in += [repr(sorted(start.env.items()))]
    goes_in += [await asyncio.to_thread(dockerfile.context_digest, folder), *(view.shown if view else [])]
    key = hashlib.sha256("\0".join(goes_in).encode()).hexdigest()[:32]

    async def fill(scratch: Path) -> None:
        named = replace(start, name=folder.parent.name)
        await build(recipe, folder, scratch, spec, view, seconds, named)

    return Image.load(await store.folder("layer", key, fill))


def ignored_settings(folder: Path, rootfs: Path, docker_image: str | None) -> list[str]:
    """Describe the settings of a task's environment that this build ignores."""
    found: list[str] = []
    here = f"the sandbox uses {rootfs} ({_name(rootfs)}) instead"
    if docker_image:
        found.append(f"docker_image {docker_image!r} is not pulled; {here}")
    if (folder / ".dockerignore").is_file():
        found.append(".dockerignore is ignored")
    if (folder / "Dockerfile").is_file():
        base = dockerfile.parse(dockerfile.read_dockerfile(folder)).base
        if base != "scratch":
            found.append(f"FROM {base} is not pulled; {here}")
    return found


def refuse_compose(folder: Path, extra: list[Path]) -> None:
    """Raise SandboxBuildError if an environment has compose files."""
    if files := [*compose_files(folder), *extra]:
        names = ", ".join(path.name for path in files)
        raise SandboxBuildError(f"{names}: the local sandbox has no sidecars; use environment_type = 'docker'")


def _identity(rootfs: Path) -> str:
    info = rootfs.stat()
    marks = [f"{rootfs}:{info.st_dev}:{info.st_ino}", _name(rootfs)]
    for name in ("var/lib/dpkg/status", "lib/apk/db/installed", "var/lib/rpm"):
        path = rootfs / name
        marks.append(str(path.stat().st_mtime_ns) if path.exists() else "")
    return "\n".join(marks)


def _name(rootfs: Path) -> str:
    try:
        lines = (rootfs / "etc/os-release").read_text().splitlines()
    except OSError:
        return "no /etc/os-release"
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "unnamed")
