"""`LocalEnvironment`: a Harbor environment on namespaces and an overlay, on this machine, without a daemon.

It implements the BaseEnvironment of Harbor 0.21 to 0.25. Log folders are downloaded as a filtered archive, not
bind-mounted. So the host never follows a link that the agent planted, and the disk limit includes the logs.
`docs/sandbox.md` describes the isolation and its limits.
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
from typing import Any, BinaryIO, override

from harbor.environments.base import EnvironmentPath, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import effective_exec_cwd, should_use_prebuilt_docker_image
from harbor.utils.path_filter import filter_paths_by_patterns

from harbortrainer.harbor_compat.open_environment import OpenEnvironment
from harbortrainer.sandbox import archives, host_root_build, host_view, local_examination, network_choice, tar_downloads
from harbortrainer.sandbox.errors_and_changes import SandboxChanges, SandboxDiedError, SandboxError
from harbortrainer.sandbox.images import host_terminal, image_cache, image_choice
from harbortrainer.sandbox.images.entrypoint import EntrypointProcess, make_workdir
from harbortrainer.sandbox.images.image_cache import DEFAULT_LIMIT_GB, GB, ImageCache
from harbortrainer.sandbox.inside.messages import NAME_FILES, Command, HostView, SandboxSpec
from harbortrainer.sandbox.interactive_process import InteractiveProcess
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.local_examination import FailedStart, failed_start
from harbortrainer.sandbox.post_mortem import PostMortem, check_host
from harbortrainer.sandbox.running_sandbox import CommandResult, RunningSandbox
from harbortrainer.sandbox.start_check import FileCheckedEnvironment
from harbortrainer.sandbox.task_image import Image

_VERIFIER = "/logs/verifier"
_CHMOD_COMMAND = re.compile(r"chmod \+x (/[\w./-]+)")
_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_warned: set[Path] = set()  # environment folders whose warning this process has logged


class LocalEnvironment(tar_downloads.TarDownloads, FileCheckedEnvironment, OpenEnvironment):
    """A sandbox on this machine.

    Args:
        image: Root filesystem: `auto`, `build` (the task's image) or `host` (`images.image_choice`).
        network: Network of a task whose mode is public: `auto`, `own` or `host` (`network_choice`).
        verifier_tools: System folders that the verifier sees: as the `agent` left them, or as the `image` has them.
        system_tasks: Names or patterns of tasks whose verifiers see them as the agent left them in any case.
        rootfs: Another root filesystem instead of the host's. It is not masked, and no image is built.
        env: Environment variables that commands in `rootfs` get, as from an image's ENV.
        images_gb: Size limit of the image and layer store, in GB; beyond it the least recently used are removed.
        cache_dir: Folder of that store.
        memory_mb, disk_mb, pids: Limits for tasks that set none, in MB, MB, and processes with threads.
    """

    def __init__(
        self,
        *args: Any,
        image: str = "auto",
        network: str = "auto",
        verifier_tools: str = "agent",
        system_tasks: Sequence[str] = (),
        rootfs: str = "/",
        env: dict[str, str] | None = None,
        cache_dir: str | None = None,
        images_gb: float = DEFAULT_LIMIT_GB,
        memory_mb: int = 2048,
        disk_mb: int = 1024,
        pids: int = 512,
        **kwargs: Any,
    ) -> None:
        self._rootfs = Path(rootfs).resolve()
        self._store = Store(Path(cache_dir) if cache_dir else None)
        self._defaults = {"memory_mb": memory_mb, "disk_mb": disk_mb, "pids": pids}
        self._sandbox: RunningSandbox | None = None
        self._processes: list[InteractiveProcess] = []
        self._grading, self._graded = False, False
        self._failed: FailedStart | None = None  # of the verifier
        self._network, self._slirp4netns_path = network, ""
        self._setting, self._env, self._images_gb = image, env or {}, images_gb
        self._image = Image()
        self._entrypoint: EntrypointProcess | None = None
        super().__init__(*args, **kwargs)
        self._image_tools = image_choice.uses_image_tools(verifier_tools, self.environment_name, system_tasks)

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
        flags = {"memory_limit": True, "cpu_limit": True, "fractional_cpus": True}  # the last since Harbor 0.25
        return EnvironmentResourceCapabilities.model_validate(flags)

    @override
    def check_definition(self) -> None:
        if not self._rootfs.is_dir():
            raise FileNotFoundError(f"rootfs {self._rootfs} is not a folder")
        self._builder = image_choice.builder_for(self._setting, self._rootfs, self._store, self._network)

    @override
    async def start(self, force_build: bool) -> None:
        host_root_build.refuse_compose(self.environment_dir, self.extra_docker_compose_paths)
        if self.network_is_public:
            self._slirp4netns_path = await network_choice.slirp4netns_path_async(self._network)
        self._warn()
        seconds = self.task_env_config.build_timeout_sec
        image = self._build_image(seconds, force_build) if self._builder else self._build_on_rootfs(seconds)
        self._image = await image
        if self._store.grew:
            await ImageCache(self._store).shrink(int(self._images_gb * GB))
        self._sandbox = await RunningSandbox.start(self._spec(), await self._view())
        self._entrypoint = EntrypointProcess(self._sandbox, self._image)
        await self._entrypoint.start()
        await self.upload_task_files()
        await self.check_start(self._image.env.get("PATH", ""))

    async def _build_image(self, seconds: float, force_build: bool) -> Image:
        """Return the task's image, with the host's tmux as its lowest layer if needed."""
        assert self._builder is not None
        docker_image = self.task_env_config.docker_image
        pulled = should_use_prebuilt_docker_image(
            self.environment_dir, docker_image=docker_image, force_build=force_build
        )
        reference = docker_image if pulled else None
        image = await image_cache.get_image(self.environment_dir, reference, self._store, self._builder, seconds)
        image_choice.require_root_user(image)
        terminal = await host_terminal.layer(self._store)
        return replace(image, lowers=[*image.lowers, *([terminal] if terminal else [])])

    async def _build_on_rootfs(self, seconds: float) -> Image:
        """Return the image that the Dockerfile's instructions make on top of the root filesystem."""
        docker_image = self.task_env_config.docker_image
        image_choice.require_host_root(self.environment_dir, docker_image, self._rootfs)
        program, spec = await network_choice.slirp4netns_path_async(self._network), self._spec()
        files = spec.files | network_choice.resolvers(program)
        building = replace(spec, network=not program, slirp4netns_path=program, files=files)
        view = await self._view()
        start = Image(env=Image().env | self._env)
        return await host_root_build.build_image(self.environment_dir, self._store, building, view, seconds, start)

    def _warn(self) -> None:
        if self.environment_dir in _warned:
            return
        _warned.add(self.environment_dir)
        found = []
        if self._builder is None:
            found += host_root_build.ignored_settings(
                self.environment_dir, self._rootfs, self.task_env_config.docker_image
            )
        if self._shares_network:
            found.append("network_mode 'public' gives it this machine's network, including its localhost")
        if found:
            self.logger.warning("%s in a local sandbox: %s", self.environment_name, "; ".join(found))

    async def raise_limits(self, *, kill: bool = False) -> None:
        """Prepare for grading: raise the limits and run commands outside the agent's namespaces.

        What has exhausted a limit is killed; with `kill`, all of the agent's processes are.
        """
        await self._running.set_grading(active=True, kill=kill)
        self._grading, self._graded, self._failed = True, False, None

    async def restore_limits(self) -> None:
        """Restore the agent's limits, and run commands in its namespaces again."""
        self._grading, self._graded = False, False
        await self._running.set_grading(active=False)

    async def _after_grading(self) -> None:
        """Restore the agent's limits if grading is over; Harbor has no event before the next step's setup."""
        if self._graded:
            await self.restore_limits()

    async def changes(self) -> SandboxChanges | None:
        """Return the changes since the agent started; None if the sandbox has ended."""
        return await local_examination.changes(self._running)

    async def listen_inside(self, port: int) -> socket.socket | None:
        """Open a socket on `port` of the sandbox's loopback; None if it shares the machine's network."""
        return None if self._shares_network else await self._running.listen(port)

    async def post_mortem(self) -> PostMortem:
        """Report what is wrong in the sandbox, and whether a fresh one of the same kind works."""
        found = PostMortem()
        if self._sandbox is not None:
            await local_examination.examine(found, self._sandbox, self._start_fresh, self._failed)
        if found.signs:
            await check_host(found, self.trial_paths.trial_dir)
        return found

    async def _start_fresh(self) -> RunningSandbox:
        sandbox = await RunningSandbox.start(self._spec(), await self._view())
        try:
            await make_workdir(sandbox, self._image)
        except BaseException:  # the caller never gets the sandbox to stop
            await sandbox.stop()
            raise
        return sandbox

    async def _view(self) -> HostView | None:
        if self._builder is not None:
            return None
        return await asyncio.to_thread(host_view.view_of, self._rootfs, hidden=(Path.cwd(), self._store.base))

    @override
    async def stop(self, delete: bool) -> None:
        if self._sandbox is not None:
            await self._sandbox.stop()
        for process in self._processes:
            process.close()
        if self._entrypoint is not None:
            await self._entrypoint.stop()
        self._store.release()

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
        request = self._command([self.shell, "-c", command], cwd, env, user)
        if found := _CHMOD_COMMAND.fullmatch(command):  # Harbor's first command of grading; needs no process
            request = replace(request, argv=["executable", found[1]], call=True)
        try:
            done = await self._running.run(request, seconds=timeout_sec or None)
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        if self._grading:
            self._failed = self._failed or failed_start(request, done)
        return _result(done)

    async def start_interactive(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, user: str | int | None = None
    ) -> InteractiveProcess:
        """Start an interactive process. It is closed when the sandbox stops."""
        await self._after_grading()
        sandbox, request = self._running, self._command(argv, None, env, user)
        process = InteractiveProcess(lambda stdin, stdout: sandbox.run(request, stdin=stdin, stdout=stdout))
        self._processes.append(process)
        return process

    def _command(
        self, argv: Sequence[str], cwd: str | None, env: dict[str, str] | None, user: str | int | None
    ) -> Command:
        resolved = self.user_of(user)
        return Command(
            list(argv),
            cwd=effective_exec_cwd(cwd, self.task_env_config.workdir, self._image.workdir) or "/",
            env=self._image.env | self.variables_of(env),
            user=self._image.user if resolved is None else resolved,
        )

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._after_grading()
        source, (folder, name) = Path(source_path), os.path.split(target_path)
        if not name or await self.is_dir(target_path):  # as `docker cp`
            folder, name = target_path, source.name
        await self._upload(folder or "/", source, name)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(target_dir, Path(source_dir))

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
        """Filter on the host. Harbor copies to /tmp in the sandbox first, where the agent could replace files."""
        with TemporaryDirectory() as folder:
            await self.download_dir(source_dir, folder)
            choose = partial(filter_paths_by_patterns, include=include, exclude=exclude)
            await asyncio.to_thread(archives.move_matching, Path(folder), Path(target_dir), choose, protect or ())

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
        request = Command(["empty", "777" if chmod else "", *map(str, dirs)], call=True)
        return _result(await self._running.run(request))

    async def clear_folders(self, writable: Sequence[EnvironmentPath], others: Sequence[EnvironmentPath]) -> ExecResult:
        """Empty folders without a process; make `writable` world-writable. Returns the first failure, if any."""
        done = await self.empty_dirs(others, chmod=False)
        if done is None or done.return_code == 0:
            done = await self.empty_dirs(writable, chmod=True)
        return done or ExecResult(return_code=0)

    async def _upload(self, folder: str, source: Path, name: str | None = None) -> None:
        await self._after_grading()
        archive = await asyncio.to_thread(archives.archive, source, name)
        try:
            done = await self._running.run(Command(["unpack", folder], call=True), stdin=archive)
        finally:
            os.close(archive)
        _expect_success(done, f"upload to {folder}")

    async def _fetch(self, call: str, path: str) -> BinaryIO:
        """Return the output of a built-in command as a file in memory. The caller closes it."""
        limit = 2 * self._limit("disk_mb", self.storage_mb) << 20
        content = os.fdopen(os.memfd_create("download", os.MFD_CLOEXEC), "r+b")
        try:
            done = await self._running.run(Command([call, path, str(limit)], call=True), stdout=content.fileno())
            _expect_success(done, f"download of {path}")
        except BaseException:  # the caller never gets the file to close
            content.close()
            raise
        if done.stderr:
            self.logger.warning("download of %s: %s", path, done.stderr.decode(errors="replace").strip())
        return content

    @property
    def _running(self) -> RunningSandbox:
        if self._sandbox is None:
            raise SandboxDiedError("the sandbox was not started")
        return self._sandbox

    @property
    def _shares_network(self) -> bool:
        """Whether the sandbox uses the machine's network."""
        return self.network_is_public and not self._slirp4netns_path

    def _limit(self, name: str, wanted: int | None) -> int:
        return wanted or self._defaults[name]

    def _spec(self) -> SandboxSpec:
        memory, disk = self._limit("memory_mb", self.memory_mb), self._limit("disk_mb", self.storage_mb)
        resolvers = network_choice.resolvers(self._slirp4netns_path) if self.network_is_public else {}
        # The user's mounts. Harbor's own mounts of the trial's log folders are left out.
        binds = [mount for mount in self.bind_mounts if not mount.target.startswith("/logs/")]
        return SandboxSpec(
            name=self.environment_name,
            rootfs=str(self._rootfs),
            lowers=self._image.lowers,
            layer=self._image.layer,
            small=self._image.small,
            binds={mount.target: mount.source for mount in binds},
            read_only=[mount.target for mount in binds if mount.read_only],
            dirs=[*_LOGS, *self.writable_targets],
            files=(NAME_FILES if self._image.lowers else {}) | resolvers,
            search_path=self._image.env.get("PATH", ""),
            image_tools=self._image_tools,
            work_dir=effective_exec_cwd(None, self.task_env_config.workdir, self._image.workdir) or "",
            network=self._shares_network,
            slirp4netns_path=self._slirp4netns_path,
            disk_mb=disk,
            memory_bytes=(memory + disk) << 20,  # the disk is a tmpfs, in memory
            pids=self._defaults["pids"],
            cpu_us=int(self.cpus * 100_000) if self.cpus else None,  # 0 is no limit, as in Docker
        )


def _result(done: CommandResult) -> ExecResult:
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return ExecResult(stdout=out, stderr=err, return_code=done.code)


def _expect_success(done: CommandResult, action: str) -> None:
    if done.code:
        raise SandboxError(f"{action} failed with code {done.code}: {done.stderr.decode(errors='replace').strip()}")
