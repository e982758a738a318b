"""Carries out a Dockerfile's steps in a sandbox whose changes land in a layer on the disk.

Invariant: a step that fails fails the build, with the step and the end of its output; a layer is whole or not there.
"""

import asyncio
import os
import posixpath
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harbortrainer.sandbox import context, transfer
from harbortrainer.sandbox import dockerfile as df
from harbortrainer.sandbox.errors import SandboxBuildError
from harbortrainer.sandbox.guest import Finished, Guest
from harbortrainer.sandbox.image import Image

_TAIL = 2000
_SMALL_ENTRIES, _SMALL_BYTES = 300, 4 << 20  # what a sandbox copies in a few milliseconds


class Builder:
    """Runs one recipe. `image` is what the steps have made of it so far."""

    def __init__(self, guest: Guest, folder: Path, seconds: float) -> None:
        self._guest, self._folder, self._seconds = guest, folder, seconds
        self._args: dict[str, str] = {}
        self.image = Image()

    async def run(self, recipe: df.Recipe) -> Image:
        """Carry out every step in order."""
        for step in recipe.steps:
            try:
                await getattr(self, f"_{step.name.lower()}")(step)
            except SandboxBuildError as error:
                raise SandboxBuildError(f"{step}: {error}") from error
        return self.image

    @property
    def _variables(self) -> dict[str, str]:
        return {**self._args, **self.image.env}

    async def _env(self, step: df.Step) -> None:
        self.image.env |= dict(df.key_values(step.value, self._variables))

    async def _arg(self, step: df.Step) -> None:
        self._args |= dict(df.key_values(step.value, self._variables, bare=""))

    async def _user(self, step: df.Step) -> None:
        self.image.user = df.substitute(step.value, self._variables).partition(":")[0]

    async def _shell(self, step: df.Step) -> None:
        self.image.shell = df.words_of(step.value, {})

    async def _workdir(self, step: df.Step) -> None:
        path = df.substitute(step.value, self._variables)
        self.image.workdir = posixpath.normpath(posixpath.join(self.image.workdir, path))
        await self._sh(f"mkdir -p -- {shlex.quote(self.image.workdir)}")

    async def _run(self, step: df.Step) -> None:
        value = step.value
        while value.startswith("--"):  # --mount=type=cache and the like change speed, not content
            value = value.split(None, 1)[1]
        argv = df.json_list(value) or [*self.image.shell, _with_bodies(value, step.bodies)]
        env = {**self._args, **self.image.env}
        done = await self._limited(argv, cwd=self.image.workdir, env=env, user=self.image.user)
        if done.code:
            raise SandboxBuildError(f"ended with code {done.code}: {_tail(done)}")

    async def _copy(self, step: df.Step) -> None:
        await self._copy_or_add(step, unpack=False)

    async def _add(self, step: df.Step) -> None:
        await self._copy_or_add(step, unpack=True)

    async def _copy_or_add(self, step: df.Step, *, unpack: bool) -> None:
        flags, rest = _flags(step.value)
        if "from" in flags:
            raise SandboxBuildError("files of another image or stage cannot be copied in a local sandbox")
        *patterns, target = df.words_of(rest, self._variables)
        if any("://" in pattern for pattern in patterns):
            raise SandboxBuildError("a URL cannot be added in a local sandbox")
        folder = await self._is_folder(target, patterns)
        target = posixpath.normpath(posixpath.join(self.image.workdir, target))
        copied = [await self._inline(target, folder, word, text) for word, text in step.bodies]
        for source in context.sources(self._folder, [p for p in patterns if not p.startswith("<<")]):
            copied += await self._put(source, target, folder=folder, unpack=unpack)
        await self._owner_and_mode(flags, copied)

    async def _is_folder(self, target: str, patterns: list[str]) -> bool:
        path = posixpath.join(self.image.workdir, target)
        if target.endswith("/") or target in (".", "..") or len(patterns) > 1:
            return True
        done = await self._guest.run(["/bin/sh", "-c", 'test -d "$0"', path], env=self.image.env)
        return done.code == 0

    async def _inline(self, target: str, folder: bool, word: str, text: str) -> str:
        path = posixpath.join(target, word) if folder else target
        await self._sh(f"mkdir -p -- {shlex.quote(posixpath.dirname(path))}")
        await self._sh(f"printf %s {shlex.quote(text)} > {shlex.quote(path)}")
        return path

    async def _put(self, source: Path, target: str, *, folder: bool, unpack: bool) -> list[str]:
        """Copy one file or the content of one folder. Returns the paths that are there now."""
        if (names := _names_in(source)) is not None:
            await self._extract(transfer.archive(source), target)
            return [posixpath.join(target, name) for name in names]
        if unpack and tarfile.is_tarfile(source):
            await self._extract(transfer.uncompressed(source), target)
            return []
        path = posixpath.join(target, source.name) if folder else target
        await self._extract(transfer.archive(source, posixpath.basename(path)), posixpath.dirname(path))
        return [path]

    async def _extract(self, archive: int, folder: str) -> None:
        try:
            done = await self._limited(["unpack", folder], call=True, stdin=archive)
        finally:
            os.close(archive)
        if done.code:
            raise SandboxBuildError(_tail(done))

    async def _owner_and_mode(self, flags: dict[str, str], paths: list[str]) -> None:
        quoted = " ".join(shlex.quote(path) for path in paths)
        if quoted and (owner := flags.get("chown")):
            owner = df.substitute(owner, self._variables)
            await self._sh(f"chown -R {shlex.quote(owner if ':' in owner else owner + ':')} -- {quoted}")
        if quoted and (mode := flags.get("chmod")):
            await self._sh(f"chmod -R {shlex.quote(mode)} -- {quoted}")

    async def _sh(self, command: str) -> None:
        done = await self._guest.run(["/bin/sh", "-c", command], env=self.image.env)
        if done.code:
            raise SandboxBuildError(_tail(done))

    async def _limited(self, argv: list[str], **more: Any) -> Finished:
        try:
            return await self._guest.run(argv, seconds=self._seconds, **more)
        except TimeoutError as error:
            raise SandboxBuildError(f"did not end within {self._seconds:.0f} s") from error


def _with_bodies(value: str, bodies: tuple[tuple[str, str], ...]) -> str:
    """A RUN with heredocs, as the script it stands for: `RUN <<EOF` alone is its body."""
    if len(bodies) == 1 and value.replace('"', "").replace("'", "").strip() in (
        f"<<{bodies[0][0]}",
        f"<<-{bodies[0][0]}",
    ):
        return bodies[0][1]
    return value + "".join(f"\n{text}{word}" for word, text in bodies) + ("\n" if bodies else "")


def _names_in(source: Path) -> list[str] | None:
    """What a folder holds; None for a file."""
    return sorted(path.name for path in source.iterdir()) if source.is_dir() else None


def _flags(value: str) -> tuple[dict[str, str], str]:
    flags: dict[str, str] = {}
    while value.startswith("--"):
        flag, _, value = value.partition(" ")
        name, _, setting = flag[2:].partition("=")
        flags[name], value = setting, value.lstrip()
    return flags, value


def _tail(done: Finished) -> str:
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-_TAIL:]


async def build(
    recipe: df.Recipe, folder: Path, scratch: Path, spec: dict[str, Any], mask: dict | None, seconds: float
) -> None:
    """Fill `scratch` with the layer (`upper`) and the image of a recipe whose context is `folder`."""
    guest = await Guest.start(spec | {"upper": str(scratch)}, mask)
    try:
        image = await Builder(guest, folder, seconds).run(recipe)
    finally:
        await guest.stop()
    small = await asyncio.to_thread(_is_small, scratch / "upper")
    replace(image, layer=None, small=small).save(scratch)


def _is_small(layer: Path) -> bool:
    entries = size = 0
    for folder, folders, files in os.walk(layer):
        entries += len(folders) + len(files)
        size += sum(os.lstat(os.path.join(folder, name)).st_size for name in files)  # noqa: PTH118
        if entries > _SMALL_ENTRIES or size > _SMALL_BYTES:
            return False
    return True
