"""`LocalEnvironment`: a Harbor environment on namespaces and an overlay, on this machine, without a daemon.

Contract: what Harbor's BaseEnvironment asks for, on Harbor 0.21 and 0.24. Log folders are not bind-mounted: what the
agent writes comes out through a filtered archive, so no link it planted is ever followed on the host, and its disk
limit holds for logs too. `docs/sandbox.md` says what the isolation is and is not.
"""

import asyncio
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast, override

from harbor.environments.base import EnvironmentPath, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import effective_exec_cwd, should_use_prebuilt_docker_image
from harbor.utils.path_filter import filter_paths_by_patterns

from harbortrainer.harbor_side.open_environment import OpenEnvironment
from harbortrainer.sandbox import archives, host_view, image_layers, local_examination, network_choice
from harbortrainer.sandbox.conversation import Conversation
from harbortrainer.sandbox.guest import Finished, Guest
from harbortrainer.sandbox.images import built_image, host_terminal, image_choice
from harbortrainer.sandbox.images.kept_images import GB, LIMIT_GB, KeptImages
from harbortrainer.sandbox.images.start_up import StartUp
from harbortrainer.sandbox.inside.messages import Command, HostView, SandboxSpec
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.post_mortem import PostMortem, check_host
from harbortrainer.sandbox.sandbox_changes import ChangedFile, How, SandboxChanges
from harbortrainer.sandbox.sandbox_errors import SandboxDiedError, SandboxError
from harbortrainer.sandbox.task_image import Image

_SHELL = "/bin/bash"
_NAMES = {"/etc/hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n", "/etc/hostname": "sandbox\n"}
_VERIFIER = "/logs/verifier"
_MADE_EXECUTABLE = re.compile(r"chmod \+x (/[\w./-]+)")
_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_warned: set[Path] = set()  # the tasks whose warning was logged by this process


class LocalEnvironment(OpenEnvironment):
    """A sandbox on this machine.

    Args:
        image: Whether its root is the task's image: `auto`, `build` or `host` (`images.image_choice`).
        network: Whose network a task with a public one has: `auto`, `own` or `host` (`network_choice`).
        rootfs: Another root filesystem in place of the host's, which is masked; no image is built then.
        env: Variables that come with it, as an image's do.
        images_gb: How large the store of images and layers may grow; then the least recently used go.
        cache_dir: Where layers are kept between runs.
        memory_mb, disk_mb, pids: The limits of a task that sets none (`memory_mb`, `storage_mb`) of its own.
    """

    def __init__(
        self,
        *args: Any,
        image: str = "auto",
        network: str = "auto",
        rootfs: str = "/",
        env: dict[str, str] | None = None,
        cache_dir: str | None = None,
        images_gb: float = LIMIT_GB,
        memory_mb: int = 2048,
        disk_mb: int = 1024,
        pids: int = 512,
        **kwargs: Any,
    ) -> None:
        self._rootfs = Path(rootfs).resolve()
        self._store = Store(Path(cache_dir) if cache_dir else None)
        self._defaults = {"memory_mb": memory_mb, "disk_mb": disk_mb, "pids": pids}
        self._guest: Guest | None = None
        self._conversations: list[Conversation] = []
        self._grading, self._graded = False, False
        self._uploaded: list[tuple[Path, str]] = []  # for grading
        self._network, self._way_out = network, ""
        self._setting, self._env, self._images_gb = image, env or {}, images_gb
        self._image = Image()
        self._start_up: StartUp | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def type() -> str:
        return "local"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, mounted=False)

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True, cpu_limit=True)

    @override
    def check_definition(self) -> None:
        if not self._rootfs.is_dir():
            raise FileNotFoundError(f"rootfs {self._rootfs} is not a folder")
        self._builder = image_choice.builder_for(self._setting, self._rootfs, self._store)

    @override
    async def start(self, force_build: bool) -> None:
        image_layers.refuse(self.environment_dir, self.extra_docker_compose_paths)
        if self.network_is_public:
            self._way_out = await network_choice.found_way_out(self._network)
        self._warn()
        seconds = self.task_env_config.build_timeout_sec
        self._image = await (self._built(seconds, force_build) if self._builder else self._on_rootfs(seconds))
        if self._store.grew:
            await KeptImages(self._store).keep_within(int(self._images_gb * GB))
        self._guest = await Guest.start(self._spec(), await self._view())
        self._start_up = StartUp(self._guest, self._image)
        await self._start_up.begin()
        await self.upload_task_files()

    async def _built(self, seconds: float, force_build: bool) -> Image:
        """The image that the task asks for, with a terminal below it."""
        assert self._builder is not None
        docker_image = self.task_env_config.docker_image
        pulled = should_use_prebuilt_docker_image(
            self.environment_dir, docker_image=docker_image, force_build=force_build
        )
        reference = docker_image if pulled else None
        image = await built_image.built(self.environment_dir, reference, self._store, self._builder, seconds)
        image_choice.refuse_other_users(image)
        terminal = await host_terminal.layer(self._store)
        return replace(image, lowers=[*image.lowers, *([terminal] if terminal else [])])

    async def _on_rootfs(self, seconds: float) -> Image:
        """What the Dockerfile's instructions leave on top of the root filesystem."""
        docker_image = self.task_env_config.docker_image
        image_choice.refuse_beyond_host(self.environment_dir, docker_image, self._rootfs)
        building, view = replace(self._spec(), network=True, way_out=""), await self._view()
        start = Image(env=Image().env | self._env)
        return await image_layers.image_of(self.environment_dir, self._store, building, view, seconds, start)

    def _warn(self) -> None:
        if self.environment_dir in _warned:
            return
        _warned.add(self.environment_dir)
        found = []
        if self._builder is None:
            found += image_layers.notices(self.environment_dir, self._rootfs, self.task_env_config.docker_image)
        if self._shares_network:
            found.append("network_mode 'public' is the network of this machine, its localhost included")
        if found:
            self.logger.warning("%s in a local sandbox: %s", self.environment_name, "; ".join(found))

    async def make_room(self, *, kill: bool = False) -> None:
        """Grading begins: outside of the agent's part, with more disk, memory and processes than the agent had, without
        what had used all of them up."""
        await self._running.grading(begins=True, kill=kill)
        self._grading, self._graded, self._uploaded = True, False, []

    async def room_is_over(self) -> None:
        """An agent works again: what is asked for now happens in its part."""
        self._grading, self._graded, self._uploaded = False, False, []
        await self._running.grading(begins=False)

    async def _after_grading(self) -> None:
        """Harbor has no event between the end of grading and the set-up of the next step."""
        if self._graded:
            await self.room_is_over()

    async def changes(self) -> SandboxChanges | None:
        """What was changed since the agent began to work; None when it has ended."""
        try:
            found = await self._running.look()
        except SandboxError:
            return None
        if found is None:
            return None
        files = zip(found.paths, found.hows, found.sizes, strict=True)
        listed = [ChangedFile(path, cast("How", how), size) for path, how, size in files]
        return SandboxChanges(listed, found.total, found.tools)

    async def listen_inside(self, port: int) -> socket.socket | None:
        """A socket that listens at `port` of its loopback; None where it has no network of its own."""
        return None if self._shares_network else await self._running.listen(port)

    async def post_mortem(self) -> PostMortem:
        """What is wrong in it, and whether a fresh sandbox of the same kind works."""
        found = PostMortem()
        if self._guest is not None:
            await local_examination.examine(found, self._guest, self._uploaded, self._fresh)
        if found.signs:
            await check_host(found, self.trial_paths.trial_dir)
        return found

    async def _fresh(self) -> Guest:
        return await Guest.start(self._spec(), await self._view())

    async def _view(self) -> HostView | None:
        if self._builder is not None:
            return None
        return await asyncio.to_thread(host_view.view_of, self._rootfs, hidden=(Path.cwd(), self._store.base))

    @override
    async def stop(self, delete: bool) -> None:
        if self._guest is not None:
            await self._guest.stop()
        for conversation in self._conversations:
            conversation.close()
        if self._start_up is not None:
            await self._start_up.end()
        self._store.let_go()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        await self._after_grading()
        asked = self._command([_SHELL, "-c", command], cwd, env, user)
        if found := _MADE_EXECUTABLE.fullmatch(command):  # so Harbor begins each grading: without a process
            asked = replace(asked, argv=["executable", found[1]], call=True)
        try:
            done = await self._running.run(asked, seconds=timeout_sec or None)
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        return _result(done)

    async def converse(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, user: str | int | None = None
    ) -> Conversation:
        """Start a command that is talked to while it runs. It is closed when the sandbox stops."""
        await self._after_grading()
        guest, asked = self._running, self._command(argv, None, env, user)
        conversation = Conversation(lambda stdin, stdout: guest.run(asked, stdin=stdin, stdout=stdout))
        self._conversations.append(conversation)
        return conversation

    def _command(
        self, argv: Sequence[str], cwd: str | None, env: dict[str, str] | None, user: str | int | None
    ) -> Command:
        who = self.user_of(user)
        return Command(
            list(argv),
            cwd=effective_exec_cwd(cwd, self.task_env_config.workdir, self._image.workdir) or "/",
            env=self._image.env | self.variables_of(env),
            user=self._image.user if who is None else who,
        )

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        folder, name = os.path.split(target_path)
        await self._upload(folder or "/", Path(source_path), name)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(target_dir, Path(source_dir))
        if self._grading:
            self._uploaded.append((Path(source_dir), target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with await self._fetch("send", source_path) as content:
            await asyncio.to_thread(archives.copy_out, content, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with await self._fetch("pack", source_dir) as archive:
            await asyncio.to_thread(archives.unpack, archive, Path(target_dir))
        self._graded = self._grading and source_dir.rstrip("/") == _VERIFIER

    @override
    async def download_dir_filtered(
        self,
        *,
        source_dir: str,
        target_dir: Path | str,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        protect: Sequence[str] | None = None,
    ) -> None:
        """Without Harbor's way over /tmp, where the agent could put something else."""
        with TemporaryDirectory() as folder:
            await self.download_dir(source_dir, folder)
            choose = partial(filter_paths_by_patterns, include=include, exclude=exclude)
            await asyncio.to_thread(archives.move_chosen, Path(folder), Path(target_dir), choose, protect or ())

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return (await self._running.run(Command(["is", "d", path], call=True, user=user))).code == 0

    @override
    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return (await self._running.run(Command(["is", "f", path], call=True, user=user))).code == 0

    @override
    async def empty_dirs(self, dirs: Sequence[EnvironmentPath], *, chmod: bool = True) -> ExecResult | None:
        if not dirs:
            return None
        asked = Command(["empty", "777" if chmod else "", *map(str, dirs)], call=True)
        return _result(await self._running.run(asked))

    async def _upload(self, folder: str, source: Path, name: str | None = None) -> None:
        await self._after_grading()
        archive = await asyncio.to_thread(archives.archive, source, name)
        try:
            done = await self._running.run(Command(["unpack", folder], call=True), stdin=archive)
        finally:
            os.close(archive)
        _expect_success(done, f"upload to {folder}")

    async def _fetch(self, call: str, path: str) -> BinaryIO:
        """What a call writes, in memory. The caller closes it."""
        limit = 2 * self._limit("disk_mb", self.storage_mb) << 20
        content = os.fdopen(os.memfd_create("download", os.MFD_CLOEXEC), "r+b")
        try:
            done = await self._running.run(Command([call, path, str(limit)], call=True), stdout=content.fileno())
            _expect_success(done, f"download of {path}")
        except BaseException:  # the caller is told, and never has the file to close
            content.close()
            raise
        if done.stderr:
            self.logger.warning("download of %s: %s", path, done.stderr.decode(errors="replace").strip())
        return content

    @property
    def _running(self) -> Guest:
        if self._guest is None:
            raise SandboxDiedError("the sandbox was not started")
        return self._guest

    @property
    def _shares_network(self) -> bool:
        """Whether the machine's network is its own."""
        return self.network_is_public and not self._way_out

    def _limit(self, name: str, wanted: int | None) -> int:
        return wanted or self._defaults[name]

    def _spec(self) -> SandboxSpec:
        memory = self._limit("memory_mb", self.memory_mb)
        disk = self._limit("disk_mb", self.storage_mb)
        resolvers = network_choice.resolvers(self._way_out) if self.network_is_public else {}
        # The mounts that the user asked for; Harbor's own, of the trial's log folders, are not made.
        binds = [mount for mount in self.bind_mounts if not mount.target.startswith("/logs/")]
        return SandboxSpec(
            rootfs=str(self._rootfs),
            lowers=self._image.lowers,
            layer=self._image.layer,
            small=self._image.small,
            binds={mount.target: mount.source for mount in binds},
            read_only=[mount.target for mount in binds if mount.read_only],
            dirs=[*_LOGS, *self.writable_targets],
            files=(_NAMES if self._image.lowers else {}) | resolvers,
            network=self._shares_network,
            way_out=self._way_out,
            disk_mb=disk,
            memory_bytes=(memory + disk) << 20,  # what is written to the disk lies in memory too
            pids=self._defaults["pids"],
            cpu_us=None if self.cpus is None else int(self.cpus * 100_000),
        )


def _result(done: Finished) -> ExecResult:
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return ExecResult(stdout=out, stderr=err, return_code=done.code)


def _expect_success(done: Finished, doing: str) -> None:
    if done.code:
        raise SandboxError(f"{doing} failed with code {done.code}: {done.stderr.decode(errors='replace').strip()}")
