"""`LocalEnvironment`: a Harbor environment on namespaces and an overlay, on this machine, without a daemon.

Contract: what Harbor's BaseEnvironment asks for, on Harbor 0.21 and 0.24. Log folders are not bind-mounted: what the
agent writes comes out through a filtered archive, so no link it planted is ever followed on the host, and its disk
limit holds for logs too. `docs/sandbox.md` says what the isolation is and is not.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, override

from harbor.environments.base import BaseEnvironment, EnvironmentPath, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import effective_exec_cwd

from harbortrainer.sandbox import layers, masks, transfer
from harbortrainer.sandbox.errors import SandboxDiedError, SandboxError
from harbortrainer.sandbox.guest import Finished, Guest
from harbortrainer.sandbox.image import Image
from harbortrainer.sandbox.layers import Layers
from harbortrainer.sandbox.store import Store

_SHELL = "/bin/bash"
_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_warned: set[Path] = set()  # the tasks whose warning was logged by this process


class LocalEnvironment(BaseEnvironment):
    """A sandbox on this machine.

    Args:
        rootfs: The root filesystem that the sandbox starts from; the host's own, masked, by default.
        cache_dir: Where layers are kept between runs.
        memory_mb, disk_mb, pids: The limits of a task that sets none (`memory_mb`, `storage_mb`) of its own.
    """

    def __init__(
        self,
        *args: Any,
        rootfs: str = "/",
        cache_dir: str | None = None,
        memory_mb: int = 2048,
        disk_mb: int = 1024,
        pids: int = 512,
        **kwargs: Any,
    ) -> None:
        self._rootfs = Path(rootfs).resolve()
        self._store = Store(Path(cache_dir) if cache_dir else None)
        self._defaults = {"memory_mb": memory_mb, "disk_mb": disk_mb, "pids": pids}
        self._guest: Guest | None = None
        self._image = Image()
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
    def _validate_definition(self) -> None:
        if not self._rootfs.is_dir():
            raise FileNotFoundError(f"rootfs {self._rootfs} is not a folder")

    @override
    async def start(self, force_build: bool) -> None:
        layers.refuse(self.environment_dir, self.extra_docker_compose_paths)
        self._warn()
        mask = await asyncio.to_thread(masks.plan, self._rootfs, hidden=(Path.cwd(), self._store.base))
        seconds = self.task_env_config.build_timeout_sec
        building = self._spec(network=True)
        self._image = await Layers(self._store, self._rootfs).image(self.environment_dir, building, mask, seconds)
        self._guest = await Guest.start(self._spec(network=self._network_is_public), mask)
        await self._upload_environment_dir_after_start()

    def _warn(self) -> None:
        if self.environment_dir in _warned:
            return
        _warned.add(self.environment_dir)
        found = layers.notices(self.environment_dir, self._rootfs, self.task_env_config.docker_image)
        if self._network_is_public:
            found.append("network_mode 'public' is the network of this machine, its localhost included")
        if found:
            self.logger.warning("%s in a local sandbox: %s", self.environment_name, "; ".join(found))

    @override
    async def stop(self, delete: bool) -> None:
        if self._guest is not None:
            await self._guest.stop()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        who = self._resolve_user(user)
        who = self._image.user if who is None else who
        try:
            done = await self._run(
                [_SHELL, "-c", command], cwd=cwd, env=self._merge_env(env), user=who, seconds=timeout_sec or None
            )
        except TimeoutError as error:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from error
        return _result(done)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        folder, name = os.path.split(target_path)
        await self._upload(folder or "/", Path(source_path), name)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(target_dir, Path(source_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with await self._fetch("send", source_path) as content:
            await asyncio.to_thread(transfer.copy_out, content, Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with await self._fetch("pack", source_dir) as archive:
            await asyncio.to_thread(transfer.unpack, archive, Path(target_dir))

    @override
    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return (await self._run(["is", "d", path], call=True, user=user)).code == 0

    @override
    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return (await self._run(["is", "f", path], call=True, user=user)).code == 0

    @override
    async def empty_dirs(self, dirs: Sequence[EnvironmentPath], *, chmod: bool = True) -> ExecResult | None:
        if not dirs:
            return None
        done = await self._run(["empty", "777" if chmod else "", *map(str, dirs)], call=True)
        return _result(done)

    async def _upload(self, folder: str, source: Path, name: str | None = None) -> None:
        archive = await asyncio.to_thread(transfer.archive, source, name)
        try:
            done = await self._run(["unpack", folder], call=True, stdin=archive)
        finally:
            os.close(archive)
        _expect_success(done, f"upload to {folder}")

    async def _fetch(self, call: str, path: str) -> BinaryIO:
        """What a call writes, in memory. The caller closes it."""
        limit = 2 * self._limit("disk_mb", self._effective_storage_mb) << 20
        content = os.fdopen(os.memfd_create("download", os.MFD_CLOEXEC), "r+b")
        try:
            done = await self._run([call, path, str(limit)], call=True, stdout=content.fileno())
            _expect_success(done, f"download of {path}")
        except BaseException:
            content.close()
            raise
        if done.stderr:
            self.logger.warning("download of %s: %s", path, done.stderr.decode(errors="replace").strip())
        return content

    async def _run(
        self, argv: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None, **more: Any
    ) -> Finished:
        if self._guest is None:
            raise SandboxDiedError("the sandbox was not started")
        folder = effective_exec_cwd(cwd, self.task_env_config.workdir, self._image.workdir) or "/"
        return await self._guest.run(argv, cwd=folder, env={**self._image.env, **(env or {})}, **more)

    def _binds(self) -> list[dict[str, Any]]:
        """The mounts that the user asked for; Harbor's own, of the trial's log folders, are not made."""
        return [
            {"source": mount["source"], "target": mount["target"], "read_only": bool(mount.get("read_only"))}
            for mount in self._mounts
            if mount["type"] == "bind" and not mount["target"].startswith("/logs/")
        ]

    def _limit(self, name: str, wanted: int | None) -> int:
        return wanted or self._defaults[name]

    def _spec(self, *, network: bool) -> dict[str, Any]:
        memory = self._limit("memory_mb", self._resource_value("memory"))
        disk = self._limit("disk_mb", self._effective_storage_mb)
        cpus = self._resource_value("cpu")
        return {
            "rootfs": str(self._rootfs),
            "layer": self._image.layer,
            "small": self._image.small,
            "binds": self._binds(),
            "upper": None,
            "disk_mb": disk,
            "inodes": 1000 * disk,
            "dirs": [*_LOGS, *self._mount_targets(writable_only=True)],
            "files": {"/etc/resolv.conf": _resolvers()} if network else {},
            "hostname": "sandbox",
            "network": network,
            # What is written to the disk lies in memory too.
            "memory_bytes": (memory + disk) << 20,
            "pids": self._defaults["pids"],
            "cpu_us": None if cpus is None else int(cpus * 100_000),
        }


def _resolvers() -> str:
    try:
        return Path("/etc/resolv.conf").read_text()
    except OSError:
        return ""


def _result(done: Finished) -> ExecResult:
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return ExecResult(stdout=out, stderr=err, return_code=done.code)


def _expect_success(done: Finished, doing: str) -> None:
    if done.code:
        raise SandboxError(f"{doing} failed with code {done.code}: {done.stderr.decode(errors='replace').strip()}")
