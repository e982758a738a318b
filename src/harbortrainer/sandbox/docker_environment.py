"""Harbor's Docker environment with immediate stops, run labels, and a post-mortem of failed trials.

Harbor still builds, starts and grades. An override file, the last of the compose files, gives the `main` service:
- an init process and no grace period. Harbor's default command ignores SIGTERM, so a stock trial waits ten seconds.
- the labels `harbortrainer.run` and `harbortrainer.owner`, by which the containers of a killed run are found.

For tasks without sidecars, `containers.direct_docker` runs Harbor's Compose commands through the daemon's API.
Invariant: a run's container carries the run's label, or belongs to the compose project of one that does.
"""

import asyncio
import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import override

from harbor.environments.base import EnvironmentPath, ExecResult
from harbor.models.trial.paths import TrialPaths

from harbortrainer.harbor_compat import options_with
from harbortrainer.runs.label import run_labels
from harbortrainer.sandbox import container_sockets, docker_examination, host_variables
from harbortrainer.sandbox.compose_files import unreadable_files
from harbortrainer.sandbox.containers import daemon_client, disk_usage, usage
from harbortrainer.sandbox.containers.container_changes import ContainerChanges
from harbortrainer.sandbox.containers.container_exit import ExitEvents
from harbortrainer.sandbox.containers.container_inventory import TASK_LABEL
from harbortrainer.sandbox.containers.daemon_release import keep_released
from harbortrainer.sandbox.containers.direct_environment import DirectDockerEnvironment
from harbortrainer.sandbox.containers.disk_usage import ContainerDisks
from harbortrainer.sandbox.containers.kill_processes import kill_leftovers
from harbortrainer.sandbox.containers.log_folders import AgentLogs, Artifacts, VerifierLogs
from harbortrainer.sandbox.containers.reward_watch import RewardWatch, forbid_devices
from harbortrainer.sandbox.containers.usage import PIDS, process_limit
from harbortrainer.sandbox.containers.verifier_waits import PhaseClock, mount_points, moved_mounts
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError, SandboxChanges
from harbortrainer.sandbox.post_mortem import PostMortem, check_host
from harbortrainer.sandbox.start_check import StartCheckedEnvironment
from harbortrainer.sandbox.tar_downloads import TarDownloads
from harbortrainer.sandbox.uploaded_tests import Uploads

_TRIAL_LABEL = "harbortrainer.trial"
IMAGE_LABEL = "harbortrainer.image"
"""Label of the images built for tasks: `docker image prune -a --filter label=harbortrainer.image` removes them."""

type _Command = tuple[str, str | None, dict[str, str] | None, int | None, str | int | None]


class DockerSandbox(TarDownloads, StartCheckedEnvironment, DirectDockerEnvironment):
    """Harbor's `docker`, with containers that stop at once and carry the run's label.

    Args:
        pids: Limit of processes and threads in a main container whose compose files set none.
    """

    options_model = options_with(DirectDockerEnvironment, pids=(int, PIDS))

    _watch: asyncio.Task[None] | None = None  # of the disk, while the container runs
    _events: ExitEvents | None = None  # listened to from before the start
    _pid = 0  # of the container's first process, if it is on this machine
    _mount_points: frozenset[str] = frozenset()  # the same
    _forbids_devices = False  # in the verifier's folder
    _release: asyncio.Task[None] | None = None  # of the daemon, while the container runs
    _changes: ContainerChanges | None = None  # of the agent's part; None before it, and if they are unknown
    _is_local = False  # whether the daemon is on this machine
    _full_disk = ""  # a message about the disk that this container filled
    _grading = False
    _collecting = False  # between the agent's end and grading: hooks may write artifacts
    _uploaded: tuple[tuple[Path, str], ...] = ()  # uploads of this grading
    _commands: tuple[_Command, ...] = ()  # commands of this grading since the uploads

    def __init__(
        self,
        *args: object,
        trial_paths: TrialPaths,
        session_id: str,
        mounts: Sequence[Mapping[str, object]] | None = None,
        auto_mounts: Sequence[Mapping[str, object]] | None = None,
        pids: int = PIDS,
        **kwargs: object,
    ) -> None:
        self._pids, self._phases = pids, PhaseClock()
        self._kept = ExitStack()  # copies of uploads that Harbor deletes
        self._reward_watch = RewardWatch(lambda process: self._phases.is_leftover(process, self._pid))
        self._agent_logs = AgentLogs(trial_paths.agent_dir, session_id)
        self._verifier_logs = VerifierLogs(trial_paths.verifier_dir, session_id)
        self._artifacts = Artifacts(trial_paths, session_id)
        kwargs |= {"trial_paths": trial_paths, "session_id": session_id, "mounts": self._mount(mounts or [])}
        if auto_mounts is not None:  # since Harbor 0.25, which mounts its own folders only if asked
            kwargs |= {"auto_mounts": self._mount(auto_mounts), "auto_mounting": True}
        super().__init__(*args, **kwargs)  # ty: ignore[invalid-argument-type] - passed through
        if files := unreadable_files(self.environment_dir):  # Compose would wait for a pipe, also to remove containers
            raise SandboxBuildError(f"{files[0].name} is not a regular file")

    def is_path_mounted(self, environment_path: EnvironmentPath, host_path: Path) -> bool:
        """Whether a path of the container is a folder of this machine: Harbor 0.25 downloads the others."""
        own = {folder.path.resolve(): folder.mounted for folder in (self._agent_logs, self._artifacts)}
        mounted = own.get(host_path.resolve(), host_path)
        return super().is_path_mounted(environment_path, mounted)  # ty: ignore[missing-attribute]

    def _mount(self, volumes: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        return self._artifacts.mount(self._agent_logs.mount(volumes))

    @override
    def override_file(self, others: Sequence[Path]) -> Path:
        path = self.trial_paths.trial_dir.resolve() / f"{self.session_id}.compose.json"
        labels = run_labels() | {TASK_LABEL: self.environment_name, _TRIAL_LABEL: self.session_id}
        main: dict[str, object] = {"init": True, "stop_grace_period": "0s", "labels": labels}
        if self.builds_image and not self._uses_compose:
            main |= {"image": self.image, "build": {"labels": {IMAGE_LABEL: self.environment_name}}}
        main |= process_limit(others, self._pids)
        path.write_text(json.dumps({"services": {"main": main}}))  # JSON is YAML
        return path

    @override
    def compose_environment(self, env: dict[str, str], infra: Collection[str]) -> dict[str, str]:
        return host_variables.compose_environment(env, os.environ, infra, self._named_variables)

    @cached_property
    def _named_variables(self) -> set[str]:
        """Variables that compose files refer to: the user's, and the task's, which names a secret only if trusted."""
        in_env = {variable for _, variable in host_variables.variables_of_env(self.task_env_config.env)}
        return in_env | set(host_variables.compose_variables(self.environment_dir, self.extra_docker_compose_paths))

    @override
    async def start(self, force_build: bool) -> None:
        data_root, folder = await daemon_client.data_root(), self.trial_paths.trial_dir
        self._is_local = data_root is not None
        self._disks = ContainerDisks.measure(folder, data_root, self.task_env_config.storage_mb)
        self._events = await ExitEvents.subscribe(self._label)
        await asyncio.to_thread(self._agent_logs.create)
        await asyncio.to_thread(self._artifacts.create)
        await super().start(force_build)
        await self.check_start()
        self._watch = asyncio.create_task(self._watch_disks(self._disks))
        container = self._direct.container
        self._pid = await docker_examination.local_pid(self._label, container.details if container else None)
        self._mount_points = frozenset(mount_points(self._pid)) if self._pid else frozenset()
        self._release = asyncio.create_task(keep_released(self._pid)) if self._pid else None
        self._forbids_devices = bool(self._pid) and await asyncio.to_thread(forbid_devices, self._pid)

    async def _watch_disks(self, disks: ContainerDisks) -> None:
        """Remove the container as soon as it fills a disk, which all trials share."""
        while not await self._remove_if_disk_full(disks):
            await disks.wait()

    async def _remove_if_disk_full(self, disks: ContainerDisks) -> bool:
        self._full_disk = self._full_disk or await disks.overuse(partial(disk_usage.written_bytes, self._label))
        if self._full_disk:
            await disk_usage.remove(self._label)
            await asyncio.to_thread(disks.truncate_files)
            self.logger.warning(
                "%s; the container is removed", self._full_disk
            )  # after the removal: a full disk takes no log
        return bool(self._full_disk)

    @override
    async def stop(self, delete: bool) -> None:
        await self._stop_watch()
        try:
            await super().stop(delete)
        finally:
            self._collecting = False
            await asyncio.to_thread(self._kept.close)
            await asyncio.to_thread(self._reward_watch.stop)
            for logs in (self._agent_logs, self._artifacts, self._verifier_logs):
                await asyncio.to_thread(logs.remove_mounted)
            await self._direct.close()
            self._stop_counting()
            if self._events is not None:
                await self._events.close()
            if self._release is not None:
                self._release.cancel()

    @override
    async def prepare_logs_for_host(self) -> None:
        try:
            await super().prepare_logs_for_host()
        finally:  # also beyond its time limit
            for copy in (self._agent_logs.collect, self._verifier_logs.detach):
                try:
                    await asyncio.to_thread(copy)
                except OSError as error:  # raised, it would keep Harbor from removing the container
                    self.logger.warning("could not copy the container's logs: %s", error)
            self._collecting = True
            await self._copy_artifacts()

    async def _copy_artifacts(self) -> None:
        """Copy the published artifacts through the daemon, which does not follow a link out of the container."""
        try:
            if await asyncio.to_thread(self._artifacts.clear):
                await self.download_dir(Artifacts.FOLDER, self._artifacts.path)
                await asyncio.to_thread(self._artifacts.keep_names)
        except (OSError, RuntimeError) as error:
            self.logger.warning("could not copy the container's artifacts: %s", error)

    @override
    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done = await super().service_exec(
            command, service=service, cwd=cwd, env=env, timeout_sec=timeout_sec, user=user
        )
        if self._collecting:  # a hook that collects artifacts
            await self._copy_artifacts()
        return done

    async def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])

    async def raise_limits(self, *, kill: bool = False) -> None:
        """Prepare for grading. Kill the agent's leftover processes if `kill` is set or a limit is exhausted."""
        self._grading, self._collecting, self._uploaded, self._commands = True, False, (), ()
        self._phases.start_grading()
        await asyncio.to_thread(self._agent_logs.publish)
        await asyncio.to_thread(self._verifier_logs.attach)
        await self._direct.close_shells()
        if short := await self.exhausted_limit():
            self.logger.warning("%s: killing the processes that the agent left running", short)
        if kill or short:
            await kill_leftovers(self._label)
        if self._forbids_devices:  # from before the folder is emptied: a file that was opened earlier is then gone
            self._reward_watch.start(self.trial_paths.verifier_dir)

    async def restore_limits(self) -> None:
        """Restore the agent's limits after grading, and count changed files from now on."""
        self._grading, self._collecting, self._uploaded, self._commands = False, False, (), ()
        await asyncio.to_thread(self._reward_watch.stop)
        self._phases.start_agent()
        await asyncio.to_thread(self._agent_logs.begin)
        await asyncio.to_thread(self._artifacts.begin)
        await asyncio.to_thread(self._verifier_logs.attach)
        await self._direct.close_shells()
        self._stop_counting()
        if details := await self._details():
            self._changes = ContainerChanges.start(details, self.trial_paths.trial_dir)

    def _stop_counting(self) -> None:
        if self._changes is not None:
            self._changes.close()
        self._changes = None

    async def _details(self) -> dict:
        """Return the daemon's description of the container; {} if it is gone or on another machine."""
        if not self._is_local:
            return {}
        container = self._direct.container
        return container.details if container is not None else await docker_examination.details(self._label)

    async def changes(self) -> SandboxChanges | None:
        """Return the changes since the agent started; None if they are unknown."""
        return None if self._changes is None else await self._changes.read()

    def reward_openings(self) -> list[str]:
        """Describe openings of the reward by processes that the agent left running."""
        return self._reward_watch.found

    async def exhausted_limit(self) -> str:
        """Describe the limit that the agent has nearly reached; "" for none."""
        return await usage.exhausted_limit(self._label)

    async def listen_inside(self, port: int) -> socket.socket | None:
        """Open a socket on `port` of the container's loopback; None if this process may not."""
        return await container_sockets.listen_in(self._label, port) if container_sockets.can_listen_inside() else None

    async def post_mortem(self) -> PostMortem:
        """Report what is wrong in the container, and whether the daemon can start another from its image."""
        found = PostMortem()
        await self._stop_watch()
        if self._disks is not None and await self._remove_if_disk_full(self._disks):
            found.signs.append(self._full_disk)
            await docker_examination.check_fresh_container(found, self.image)
        else:
            if self._pid:
                found.signs += await asyncio.to_thread(self._phases.describe_waits, self._pid)
                found.signs += moved_mounts(self._pid, self._mount_points)
            await docker_examination.examine(found, self._label, self._events, self.task_env_config.workdir)
        found.signs += self._reward_watch.found
        if found.signs:
            await check_host(found, self.trial_paths.trial_dir)
        return found

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        folder = Path(source_dir)
        if self._grading and not folder.is_relative_to(self.environment_dir.parent):
            # Harbor 0.25 deletes the filtered copy of a task with a `.harborignore` after the upload.
            copy = TemporaryDirectory(prefix="harbortrainer-tests-", ignore_cleanup_errors=True)
            copy_tests = partial(copytree, folder, self._kept.enter_context(copy), symlinks=True, dirs_exist_ok=True)
            folder = Path(await asyncio.to_thread(copy_tests))
        uploads = (*self._uploaded, (folder, target_dir))
        try:
            await super().upload_dir(folder, target_dir)
        except RuntimeError:
            if not self._grading:
                raise
            await self._upload_again(uploads)
        if self._grading:
            self._uploaded = uploads

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        commands = [*self._commands, (command, cwd, env, timeout_sec, user)]
        if self._uploaded:
            await asyncio.to_thread(self._verifier_logs.attach)
        done = await super().exec(*commands[-1])
        if self._uploaded:
            if not any(path.exists() for path in self._reward_paths()):
                intact = await self._uploads_intact()
                if not intact or await self.exhausted_limit():
                    done = await self._grade_again(commands)
                    if not intact and not await self._uploads_intact():
                        # The verifier edits its tests: the agent did not, and its services ended for nothing.
                        for path in self._reward_paths():
                            path.unlink(missing_ok=True)
            self._commands = tuple(commands)
            await asyncio.to_thread(self._verifier_logs.detach)
        return done

    async def _grade_again(self, commands: Sequence[_Command]) -> ExecResult:
        """Upload again and repeat the commands without the processes that the agent left running."""
        await self._upload_again(self._uploaded)
        for command in commands:  # including the one that made the tests executable
            done = await super().exec(*command)
        return done

    def _reward_paths(self) -> tuple[Path, ...]:
        return self.trial_paths.reward_text_path, self.trial_paths.reward_json_path

    async def _uploads_intact(self) -> bool:
        targets, container = {target for _, target in self._uploaded}, self._direct.container
        if container is not None:
            checks = [
                await docker_examination.archive_intact(container.download_archive, t, self._uploaded) for t in targets
            ]
            return all(checks)
        return all([await docker_examination.uploads_intact(self._label, t, self._uploaded) for t in targets])

    async def _upload_again(self, uploads: Uploads) -> None:
        """Repeat the uploads after killing the leftover processes that interfere with them."""
        await self.raise_limits(kill=True)
        await self.empty_dirs(sorted({target for _, target in uploads}), chmod=False)
        for folder, target in uploads:
            await super().upload_dir(folder, target)
        self._uploaded = tuple(uploads)

    @property
    def _label(self) -> str:
        return f"{_TRIAL_LABEL}={self.session_id}"
