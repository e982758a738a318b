"""The user's Docker or podman as image builder: it builds and pulls into its own store, and exports the image.

Contract: an image is returned as a `task_image.Image` whose `lowers` are our own folders (`layers.UnpackedLayers`), so
removing it from the engine's store does not affect sandboxes. It needs only permission to use the engine; the layers of
an unprivileged user belong to that user.

Invariants: an image whose layers are all unpacked is not exported again. The exported archive is an unnamed file, so a
killed process leaves none behind.
"""

import asyncio
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import cache, partial
from pathlib import Path
from typing import IO, Literal

from harbortrainer.runs.locks import file_lock
from harbortrainer.sandbox.dockerfile import inline_heredocs, normalize_heredocs, read_dockerfile
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images import build_support
from harbortrainer.sandbox.images.build_support import build_lock
from harbortrainer.sandbox.images.child_process import Output, run_child
from harbortrainer.sandbox.images.image_config import image_from_config
from harbortrainer.sandbox.images.layer_archive import unpack
from harbortrainer.sandbox.images.layers import UnpackedLayers
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.task_image import Image

type Program = Literal["docker", "podman"]
PROGRAMS: tuple[Program, ...] = ("docker", "podman")
LABEL = "harbortrainer.image=sandbox"
"""Label of the built images: `docker image prune -a --filter label=harbortrainer.image` removes them."""
_HEREDOC_VERSIONS = {"docker": ("{{.Server.Version}}", (23, 0)), "podman": ("{{.Client.Version}}", (4, 8))}
_MAX_BUILDS = 3
_REMOVED_STEP = 'unable to find image "sha256:'
"""What Docker's builder says when another process removed, during the build, the result of a step that it reuses."""
_MAX_SAVES = 4
_TEMPORARY = "/var/tmp"  # podman keeps the caches of RUN there, unless TMPDIR names another folder
_QUERY_S = 60.0
_PROBE_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 101
_MIN_ID_MAPS = 2  # lines of uid_map: one maps only the user's own id
_SUBID_REMEDY = "sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER, then podman system migrate"


class ContainerEngine:
    """Builder that runs Docker or podman, with the store for the unpacked layers."""

    def __init__(self, program: Program, store: Store, network: str = "auto") -> None:
        self.kind: str = program
        self._network = network
        self._store = store
        self._layers = UnpackedLayers(store)
        self._folder = store.own / program

    async def build(self, context: Path, name: str, seconds: float) -> Image:
        """Build the Dockerfile of a folder.

        Raises:
            SandboxBuildError: The build failed; the message has the step and the end of the output.
        """
        text = await asyncio.to_thread(read_dockerfile, context)
        async with build_lock(self._folder, text):
            with ExitStack() as scratch:
                dockerfile = context / "Dockerfile"
                if "<<" in text:
                    folder = scratch.enter_context(tempfile.TemporaryDirectory())
                    dockerfile = Path(folder) / "Dockerfile"
                    dockerfile.write_text(
                        normalize_heredocs(text) if await self._supports_heredocs() else inline_heredocs(text)
                    )
                # podman's default format has no HEALTHCHECK and no SHELL
                form = ("--format", "docker") if self.kind == "podman" else ()
                arguments = (*form, "--force-rm", "--label", LABEL, "-f", str(dockerfile), "-t", name, str(context))
                if self.kind == "podman" and self._store.flavour == "root":
                    runtime = await asyncio.to_thread(build_support.write_runtime, self._folder)
                    scratch = Path(os.environ.get("TMPDIR") or _TEMPORARY)
                    env = await build_support.runtime_environment(self._network, context, scratch, await self._stores())
                    options: tuple[str, ...] = ("--runtime", str(runtime))
                    arguments = ("--isolation", "oci", "--network", "host", *arguments)
                else:
                    env, options = {}, ()
                for _ in range(_MAX_BUILDS):
                    result = await self._run("build", *arguments, options=options, seconds=seconds, env=env)
                    if not result.code or _REMOVED_STEP not in result.tail:
                        break
        if result.code:
            raise SandboxBuildError(f"the Dockerfile cannot be built: {result.tail}")
        return await self._inspect_image(name)

    async def pull(self, reference: str, seconds: float) -> Image:
        """Return the image of that name, from the local store or its registry.

        Raises:
            SandboxBuildError: It cannot be pulled.
        """
        present = await self._run("image", "inspect", reference, seconds=_QUERY_S)
        if present.code:
            result = await self._run("pull", reference, seconds=seconds)
            if result.code:
                raise SandboxBuildError(f"docker_image {reference!r} cannot be pulled: {result.tail}")
        return await self._inspect_image(reference)

    async def remove(self, name: str) -> None:
        """Remove an image from the engine's store. A missing image is no error."""
        await self._run("rmi", name, seconds=_QUERY_S)

    async def _inspect_image(self, name: str) -> Image:
        result = await self._run("image", "inspect", name, seconds=_QUERY_S)
        if result.code:
            raise SandboxBuildError(f"image {name!r} cannot be read: {result.tail}")
        (found,) = json.loads(result.out)
        config = found["Config"]
        if check := found.get("Healthcheck"):  # podman reports it outside the config
            config["Healthcheck"] = check
        image = image_from_config(config, found.get("History") or ())
        image.lowers = await self._layer_folders(found["Id"], found["RootFS"]["Layers"] or [])
        return image

    async def _layer_folders(self, image_id: str, digests: list[str]) -> list[str]:
        """Return an image's layer folders, topmost first; export the image if one is missing."""
        async with AsyncExitStack() as archives:
            saved: list[_SavedImage] = []
            if not all(map(self._layers.has, digests)):
                # Limit the archives, which are as large as images. Lock before any layer, for which others wait.
                locks = (self._folder / f".saving{number}.lock" for number in range(_MAX_SAVES))
                await archives.enter_async_context(file_lock(*locks))

            async def fill(digest: str, folder: Path) -> int:
                if not saved:
                    file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed with `archives`
                    archives.callback(file.close)
                    await self._save(image_id, file)
                    saved.append(_SavedImage(file))
                return await asyncio.to_thread(saved[0].unpack, digest, folder, self._store.flavour == "root")

            folders = {digest: await self._layers.files(digest, partial(fill, digest)) for digest in digests}
        # An overlay refuses to mount a duplicate layer. Only the topmost has an effect.
        return [folders[digest] for digest in dict.fromkeys(reversed(digests))]

    async def _save(self, image_id: str, file: IO[bytes]) -> None:
        result = await self._run("save", image_id, seconds=None, out=file)
        if result.code:
            raise SandboxBuildError(f"{self.kind} cannot save the image: {result.tail}")

    async def _stores(self) -> list[Path]:
        """Return podman's stores of images and containers, which the user's settings may move."""
        result = await self._run("info", "--format", "{{.Store.GraphRoot}}\n{{.Store.RunRoot}}", seconds=_QUERY_S)
        if result.code:
            raise SandboxBuildError(f"podman cannot describe its stores: {result.tail}")
        return [Path(line) for line in result.out.splitlines()]

    async def _supports_heredocs(self) -> bool:
        if self.kind == "docker" and (await self._run("buildx", "version", seconds=_QUERY_S)).code:
            return False
        wanted, since = _HEREDOC_VERSIONS[self.kind]
        result = await self._run("version", "--format", wanted, seconds=_QUERY_S)
        return result.code == 0 and build_support.parse_version(result.out) >= since

    async def _run(
        self,
        *arguments: str,
        options: tuple[str, ...] = (),
        seconds: float | None,
        out: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Output:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        runs_here = self.kind == "podman"  # Docker's work is done by its daemon
        variables = {**(build_support.builder_environment(self._folder) if runs_here else {}), **(env or {})}
        isolated = runs_here and self._store.flavour == "root"
        return await run_child(
            [self.kind, *options, *arguments], env=variables, seconds=seconds, isolated=isolated, out=out
        )


class _SavedImage:
    """Archive written by `docker save` or `podman save`, in any of its formats."""

    def __init__(self, file: IO[bytes]) -> None:
        file.seek(0)
        try:
            self._tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the caller closes the file
            (manifest,) = json.load(self._content("manifest.json"))
            digests = json.load(self._content(manifest["Config"]))["rootfs"]["diff_ids"]
            self._names = dict(zip(digests, manifest["Layers"], strict=True))
        except (tarfile.TarError, KeyError, ValueError) as error:
            raise SandboxBuildError(f"the saved image has an unknown archive format: {error}") from error

    def unpack(self, digest: str, folder: Path, privileged: bool) -> int:
        return unpack(self._content(self._names[digest]), folder, privileged=privileged)

    def _content(self, name: str) -> IO[bytes]:
        found = self._tar.extractfile(name)
        if found is None:
            raise KeyError(name)
        return found


@cache
def engine_problem(program: Program) -> str:
    """Describe why a container engine cannot be used; "" if it can.

    The result is cached for the process, so that all sandboxes of a run use the same builder.
    """
    if not is_installed(program):
        return f"{program} is not installed"
    rootless = program == "podman" and os.geteuid() != 0
    arguments = ("unshare", "cat", "/proc/self/uid_map") if rootless else ("ps", "-q")
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return f"{program} does not answer within {_PROBE_TIMEOUT_S:.0f} s"
    if result.returncode == 0:
        lacks_ids = rootless and result.stdout.count("\n") < _MIN_ID_MAPS
        return f"podman has no subordinate user ids for this user ({_SUBID_REMEDY})" if lacks_ids else ""
    reason = " ".join(result.stderr.split())[:_MAX_ERROR_CHARS] or f"code {result.returncode}"
    return f"{program} does not answer ({reason})"


def is_installed(program: Program) -> bool:
    """Return whether the engine and `setpriv`, which ties it to this process, are installed."""
    return all(shutil.which(name) for name in (program, "setpriv"))
