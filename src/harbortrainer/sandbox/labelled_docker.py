"""Harbor's Docker environment, stopped at once, labelled with the run, and examined when its trial has failed.

Everything that builds, starts and grades stays Harbor's. An overlay, last in the list of compose files, gives the
`main` service an init process and no grace period (Harbor's default command ignores SIGTERM, so that every stock trial
waits ten seconds for its end) and the label `harbortrainer.run`, by which a launcher finds what a killed run left.
What Harbor asks Compose for is done by `containers.without_compose` where the task has no sidecars.
Invariant: a container of a run carries the run's label, or belongs to the compose project of one that does.
"""

import json
import os
import socket
from functools import cached_property
from pathlib import Path
from typing import override

from harbor.environments.base import ExecResult

from harbortrainer.harbor_side.overlaid_docker import Asked, OverlaidDocker
from harbortrainer.runs.label import RUN_LABEL, RUN_VARIABLE
from harbortrainer.sandbox import container_sockets, docker_examination
from harbortrainer.sandbox.containers.without_compose import WithoutCompose
from harbortrainer.sandbox.post_mortem import PostMortem, check_host
from harbortrainer.sandbox.uploaded_tests import Uploads

_TRIAL_LABEL = "harbortrainer.trial"
IMAGE_LABEL = "harbortrainer.image"
"""On the images that are built for tasks: `docker image prune -a --filter label=harbortrainer.image`."""


class LabelledDocker(OverlaidDocker):
    """Harbor's `docker`, with containers that end at once and carry the run's label."""

    _grading = False
    _uploaded: tuple[tuple[Path, str], ...] = ()  # for grading

    @cached_property
    def _direct(self) -> WithoutCompose:
        return WithoutCompose(self)

    @override
    def overlay_file(self) -> Path:
        path = self.trial_paths.trial_dir.resolve() / f"{self.session_id}.compose.json"
        labels = {RUN_LABEL: os.environ.get(RUN_VARIABLE, "none"), _TRIAL_LABEL: self.session_id}
        main: dict[str, object] = {"init": True, "stop_grace_period": "0s", "labels": labels}
        if self.builds and not self._uses_compose:
            main |= {"image": self.image, "build": {"labels": {IMAGE_LABEL: self.environment_name}}}
        path.write_text(json.dumps({"services": {"main": main}}))  # JSON is YAML
        return path

    @override
    async def instead_of_compose(self, asked: Asked) -> ExecResult | None:
        return await self._direct.do(asked)

    @override
    async def stop(self, delete: bool) -> None:
        try:
            await super().stop(delete)
        finally:
            await self._direct.close()

    async def make_room(self, *, kill: bool = False) -> None:
        """Grading begins. There are no limits to widen; with `kill` what the agent left running is killed."""
        self._grading, self._uploaded = True, ()
        await self._direct.renew()
        if kill:
            await docker_examination.kill_leftovers(self._label)

    async def room_is_over(self) -> None:
        """An agent works again."""
        self._grading, self._uploaded = False, ()
        await self._direct.renew()

    async def listen_inside(self, port: int) -> socket.socket | None:
        """A socket that listens at `port` of its loopback; None where this process may not make one."""
        return await container_sockets.listen_in(self._label, port) if container_sockets.makes_them_inside() else None

    async def post_mortem(self) -> PostMortem:
        """What is wrong in it, and whether the daemon can start another of its image."""
        found = PostMortem()
        await docker_examination.examine(found, self._label, self._uploaded)
        if found.signs:
            await check_host(found, self.trial_paths.trial_dir)
        return found

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        uploads = (*self._uploaded, (Path(source_dir), target_dir))
        try:
            await super().upload_dir(source_dir, target_dir)
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
        done = await super().exec(command, cwd, env, timeout_sec, user)
        if self._uploaded and not self._rewarded() and not await self._uploads_are_whole():
            await self._upload_again(self._uploaded)
            done = await super().exec(command, cwd, env, timeout_sec, user)
        return done

    def _rewarded(self) -> bool:
        """Whether the verifier has given a reward: its folder is mounted."""
        return self.trial_paths.reward_text_path.exists() or self.trial_paths.reward_json_path.exists()

    async def _uploads_are_whole(self) -> bool:
        targets, container = {target for _, target in self._uploaded}, self._direct.container
        if container is not None:
            return all([await docker_examination.holds(container.copy_out, t, self._uploaded) for t in targets])
        return all([await docker_examination.are_whole(self._label, t, self._uploaded) for t in targets])

    async def _upload_again(self, uploads: Uploads) -> None:
        """Something that the agent left running keeps taking the place: without it."""
        await self.make_room(kill=True)
        await self.empty_dirs(sorted({target for _, target in uploads}), chmod=False)
        for folder, target in uploads:
            await super().upload_dir(folder, target)
        self._uploaded = tuple(uploads)

    @property
    def _label(self) -> str:
        return f"{_TRIAL_LABEL}={self.session_id}"
