"""Sandboxes on images built by the user's Docker or podman, where buildah is not available."""

import asyncio
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import leftovers
import pytest
from image_setup import ENGINES, SLIM, own_podman_store
from patience import wait_until

from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images import container_engine, image_choice
from harbortrainer.sandbox.images.child_process import Output
from harbortrainer.sandbox.images.container_engine import ContainerEngine
from harbortrainer.sandbox.images.image_cache import IMAGE_PREFIX, ImageCache
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.tasks.task_check import check_tasks
from harbortrainer.tasks.task_folder import load_folder

TASKS = Path(__file__).parents[2] / "datasets/harbor_tasks"
EVERYTHING = f"""\
{SLIM}
SHELL ["/usr/bin/bash", "-c"]
ENV GREETING="hello you" PLACE=/srv/app
COPY tool.sh /tool.sh
RUN [[ -n $BASH_VERSION ]] && echo worker:x:1234:1234::/home/worker:/bin/sh >> /etc/passwd \\
 && mkdir -p /home/worker /kept/old /emptied/old && touch /kept/old/a /kept/b /emptied/old/c \\
 && echo 1 > /srv/one && ln /srv/one /srv/two && ln -s one /srv/three && chown 7:8 /srv/two && chmod 4711 /srv/one
RUN rm -r /kept/b /emptied /srv/three && mkdir /emptied && touch /emptied/new && chown 1234:1234 /home/worker
RUN cat > /apart << 'END'
$GREETING as it stands
END
RUN <<EOF
set -e
echo "here, $GREETING" > /heredoc
EOF
WORKDIR $PLACE
WORKDIR sub
USER worker
HEALTHCHECK --interval=1s CMD test -e /tmp/ready
ENTRYPOINT ["/usr/bin/bash", "/tool.sh"]
"""


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch, tmp_path_factory):
    """The name of an engine, the only builder in this test."""
    monkeypatch.setattr(image_choice.Buildah, "problem", lambda: "buildah is not installed")
    monkeypatch.setattr(image_choice, "PROGRAMS", (request.param,))
    with own_podman_store(request.param, tmp_path_factory):
        yield request.param


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A shared store; its images are removed from the engines' stores at the end."""
    folder = tmp_path_factory.mktemp("engine")
    yield folder
    asyncio.run(ImageCache(Store(folder)).shrink(0))
    assert ImageCache(Store(folder)).list_images() == []


@pytest.fixture
def make_image_sandbox(make_sandbox, cache, engine):
    return lambda **options: make_sandbox(**{"image": "build", "cache_dir": str(cache)} | options)


async def test_every_dockerfile_instruction_takes_effect(make_image_sandbox):
    tool = '#!/bin/sh\necho "$GREETING" > /tmp/started; (sleep 0.3; touch /tmp/ready) &\nexec "$@"\n'
    sandbox = await make_image_sandbox(dockerfile=EVERYTHING, files={"tool.sh": tool})

    async def out(command: str) -> list[str]:
        done = await sandbox.exec(command)
        return (done.stdout + done.stderr).splitlines()

    assert await out("pwd; id -u; echo ~; cat /tmp/started /heredoc /apart; ls /tmp/ready") == [
        *("/srv/app/sub", "1234", "/home/worker", "hello you", "here, hello you", "$GREETING as it stands"),
        "/tmp/ready",
    ]
    assert await out("ls -A /kept /kept/old /emptied; ls /srv") == [
        *("/emptied:", "new", "", "/kept:", "old", "", "/kept/old:", "a", "app", "one", "two")
    ]
    assert await out("stat -c '%a %u %g %h' /srv/one; stat -c '%u %a' /home/worker") == ["4711 7 8 2", "1234 755"]
    linked = await sandbox.exec("echo more >> /srv/one; cat /srv/two", user="root")
    assert linked.stdout == "1\nmore\n"


async def test_same_first_lines_share_layers(make_image_sandbox, cache):
    first = f"{SLIM}RUN head -c 3M /dev/urandom > /shared\n"
    dockerfiles = [f"{first}RUN head -c 1M /dev/urandom > /own; echo {n}\n" for n in range(2)]
    await make_image_sandbox(dockerfile=SLIM)
    before = ImageCache(Store(cache)).size()
    boxes = await asyncio.gather(*(make_image_sandbox(dockerfile=text) for text in dockerfiles))
    lowers = [box._image.lowers for box in boxes]
    assert lowers[0][0] != lowers[1][0]
    assert lowers[0][1:] == lowers[1][1:]
    assert 5 << 20 <= ImageCache(Store(cache)).size() - before < 6 << 20


async def test_concurrent_requests_share_one_build_and_unpacked_image_is_not_saved(make_image_sandbox, monkeypatch):
    commands, real = [], ContainerEngine._run

    async def counting_run(self, *arguments, **more):
        commands.append(arguments[0])
        return await real(self, *arguments, **more)

    monkeypatch.setattr(ContainerEngine, "_run", counting_run)
    text = f"{SLIM}RUN echo {os.getpid()} > /stamp; sleep 0.3\n"
    await asyncio.gather(*(make_image_sandbox(dockerfile=text) for _ in range(3)))
    assert (commands.count("build"), commands.count("save")) == (1, 1)
    again = await make_image_sandbox(dockerfile=f"{text}ENV A=1\n")
    assert (await again.exec("cat /stamp; echo $A")).stdout.split() == [str(os.getpid()), "1"]
    assert (commands.count("build"), commands.count("save")) == (2, 1)


REMOVED_STEP = f"Step 4/7 : COPY --from=whole /slim /\nunable to find image {json.dumps('sha256:' + 64 * '6')}\n"


@pytest.mark.parametrize(("failures", "builds"), [(2, 3), (3, 3)])
async def test_build_whose_cached_step_was_removed_is_repeated(make_image_sandbox, monkeypatch, failures, builds):
    """`docker rmi` of another image removes steps that this build has just found in Docker's cache."""
    commands, real = [], ContainerEngine._run

    async def run_with_removals(self, *arguments, **more):
        commands.append(arguments[0])
        if arguments[0] == "build" and commands.count("build") <= failures:
            return Output(1, REMOVED_STEP, "")
        return await real(self, *arguments, **more)

    monkeypatch.setattr(ContainerEngine, "_run", run_with_removals)
    text = f"{SLIM}RUN echo {failures}\n"
    if failures < builds:
        assert (await (await make_image_sandbox(dockerfile=text)).exec("echo plays")).stdout == "plays\n"
    else:
        with pytest.raises(SandboxBuildError, match="unable to find image"):
            await make_image_sandbox(dockerfile=text)
    assert commands.count("build") == builds


async def test_build_and_pull_errors_have_reason(make_image_sandbox):
    with pytest.raises(SandboxBuildError, match=r"(?s)to the log.*exit 7"):
        await make_image_sandbox(dockerfile=f"{SLIM}RUN echo to the log; exit 7\n")
    with pytest.raises(SandboxBuildError, match=r"localhost:9/nowhere.* cannot be pulled"):
        await make_image_sandbox(task={"docker_image": "localhost:9/nowhere:1"})


async def test_removed_image_keeps_shared_and_used_layers(make_image_sandbox, tmp_path, engine, monkeypatch):
    engines, real = [], ContainerEngine.remove

    async def recording_remove(self, name):
        engines.append(self.kind)
        await real(self, name)

    monkeypatch.setattr(ContainerEngine, "remove", recording_remove)
    cache = tmp_path / "cache"
    texts = [f"{SLIM}RUN head -c {n}M /dev/urandom > /own\n" for n in (1, 2)]
    one, two = [await make_image_sandbox(dockerfile=text, cache_dir=str(cache)) for text in texts]
    kept = ImageCache(Store(cache))
    whole = kept.size()
    assert await kept.shrink(0) == []
    await two.stop(delete=True)
    (removed,) = await kept.shrink(0)
    assert engines == [engine]
    assert not run_engine(engine, "images", "-q", IMAGE_PREFIX + removed.key)
    assert whole - kept.size() == 2 << 20
    assert (await one.exec("stat -c %s /own")).stdout == f"{1 << 20}\n"
    assert [image.layers.keys() for image in kept.list_images()] == [
        set(one._image.lowers) & kept.list_images()[0].layers.keys()
    ]
    await one.stop(delete=True)
    await kept.shrink(0)
    assert (kept.list_images(), kept.size(), list((cache / "root/unpacked").glob("[0-9a-f]*"))) == ([], 0, [])


def run_engine(engine: str, *arguments: str) -> str:
    return subprocess.run([engine, *arguments], capture_output=True, text=True, check=False).stdout


SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from harbortrainer.sandbox.images import container_engine
from harbortrainer.sandbox.layer_store import Store
def stop_there(*_, **__):
    print("busy", flush=True)
    time.sleep(600)
if sys.argv[4] == "unpacking":
    container_engine.unpack = stop_there
engine = container_engine.ContainerEngine(sys.argv[3], Store(Path(sys.argv[1])))
asyncio.run(engine.build(Path(sys.argv[2]), "localhost/harbortrainer/killed", 600))
"""


@pytest.mark.parametrize("killed", ["building", "unpacking"])
async def test_killed_build_leaves_no_process_and_no_layer(make_image_sandbox, tmp_path, engine, killed):
    cache, mark = tmp_path / "cache", f"sleep 7{os.getpid()}"
    text = f"{SLIM}RUN touch /begun\n" + (f"RUN {mark}\n" if killed == "building" else "")
    box = await make_image_sandbox(dockerfile=text, cache_dir=str(cache), start=False)
    before = working_containers(engine, mark)
    kill_a_build([str(cache), str(box.environment_dir), engine, killed], mark)
    if engine == "podman":
        for container in working_containers(engine, mark) - before:  # podman's own store keeps them
            run_engine(engine, "rm", "--force", container)
    wait_until(lambda: working_containers(engine, mark) == before)  # Docker's daemon removes them a moment later
    assert ImageCache(Store(cache)).list_images() == []
    assert ImageCache(Store(cache)).size() == 0
    unfinished = list(cache.rglob("*.part"))
    assert bool(unfinished) == (killed == "unpacking")
    await ImageCache(Store(cache)).shrink(10**12)
    assert list(cache.rglob("*.part")) == []
    (box.environment_dir / "Dockerfile").write_text(text.replace(mark, "true"))
    await box.start(force_build=False)
    assert (await box.exec("ls /begun")).stdout == "/begun\n"
    assert leftovers.unfinished(cache) == []
    await box.stop(delete=True)
    await ImageCache(Store(cache)).shrink(0)
    run_engine(engine, "rmi", "--force", "localhost/harbortrainer/killed")


def working_containers(engine: str, mark: str) -> set[str]:
    """Return the containers that build this test's step: the daemon also serves others."""
    form = ("--no-trunc", "--format", "{{.ID}} {{.Command}} {{.Names}}")
    listed = run_engine(engine, "ps", "-a", *form, *(["--external"] if engine == "podman" else [])).splitlines()
    own = mark if engine == "docker" else "working-container"
    return {line.split()[0] for line in listed if own in line}


def kill_a_build(arguments: list[str], mark: str) -> None:
    """Kill a build while a step runs or a layer is unpacked, and wait until its processes have ended."""
    builder = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE)
    if arguments[-1] == "building":
        wait_until(lambda: running(mark))
    else:
        assert builder.stdout
        assert builder.stdout.readline() == b"busy\n"
    builder.kill()
    builder.wait()
    wait_until(lambda: not running(mark) and not running(arguments[0]))


def running(words: str) -> str:
    return subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False).stdout


@pytest.mark.e2e
async def test_oracle_passes_on_task_image(engine, tmp_path):
    shutil.copytree(TASKS / "log-error-report", tmp_path / "tasks/log-error-report")
    kwargs = {"image": "build", "cache_dir": str(tmp_path / "cache")}
    (verdict,) = await check_tasks(load_folder(tmp_path / "tasks"), environment_kwargs=kwargs)
    assert verdict.problem == ""
    (image,) = ImageCache(Store(tmp_path / "cache")).list_images()
    assert any("/unpacked/" in path for path in image.layers)
    await ImageCache(Store(tmp_path / "cache")).shrink(0)


async def test_prebuilt_image_is_used_by_name_and_stays_in_engine(engine, make_image_sandbox, tmp_path):
    name = f"localhost/slim-{os.getpid()}:1"
    (tmp_path / "Dockerfile").write_text(f"{SLIM}ENV MARK=here\n")
    run_engine(engine, "build", "-t", name, str(tmp_path))
    box = await make_image_sandbox(task={"docker_image": name}, cache_dir=str(tmp_path / "cache"))
    assert (await box.exec("echo $MARK")).stdout == "here\n"
    await box.stop(delete=True)
    await ImageCache(Store(tmp_path / "cache")).shrink(0)
    assert run_engine(engine, "images", "-q", name)
    run_engine(engine, "rmi", name)


STAND_IN = """#!/bin/sh
case "$1" in
  image) cat {0}/inspected ;;
  save) echo save >> {0}/asked; cat {0}/saved ;;
esac
"""


def saved_image(folder: Path, layers: list[bytes], *, linked: bool) -> None:
    """Write an engine's `inspect` and `save` output: as Docker since version 25 (compressed blobs), or earlier."""
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    names = [f"blobs/sha256/{number}" for number in range(len(layers))]
    config = json.dumps({"rootfs": {"diff_ids": digests}}).encode()
    manifest = json.dumps([{"Config": "blobs/sha256/config", "Layers": names}]).encode()
    found = [{"Id": "sha256:x", "Config": {"Env": ["A=1"]}, "RootFS": {"Layers": digests}}]
    (folder / "inspected").write_text(json.dumps(found))
    with tarfile.open(folder / "saved", "w") as tar:
        add(tar, "blobs/sha256/config", config)
        for name, layer in zip(names, layers, strict=True):
            add(tar, f"{name}-content" if linked else name, gzip.compress(layer))
            if linked:
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"../sha256/{Path(name).name}-content"
                tar.addfile(link)
        add(tar, "manifest.json", manifest)


def names_in(folders: list[str]) -> list[list[str]]:
    return [[path.name for path in Path(folder).iterdir()] for folder in folders]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("linked", [False, True])
async def test_reads_every_archive_format_and_drops_duplicate_layers(tmp_path, monkeypatch, linked):
    layers = []
    for name in ("low", "high"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            add(tar, name, name.encode())
        layers.append(file.getvalue())
    saved_image(tmp_path, [layers[0], layers[1], layers[0]], linked=linked)
    (tmp_path / "docker").write_text(STAND_IN.format(tmp_path))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    engine = ContainerEngine("docker", Store(tmp_path / "cache"))
    for _ in range(2):
        image = await engine.pull("any:1", 10)
        assert names_in(image.lowers) == [["low"], ["high"]]
        assert image.env["A"] == "1"
    assert (tmp_path / "asked").read_text() == "save\n"
    (tmp_path / "saved").write_bytes(b"no archive")
    with pytest.raises(SandboxBuildError, match="unknown archive format"):
        await ContainerEngine("docker", Store(tmp_path / "another")).pull("any:1", 10)


def test_unreachable_engine_is_reported(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(f"#!/bin/sh\necho permission denied while trying: {'x' * 200} >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(image_choice.Buildah, "problem", lambda: "buildah is not installed")
    monkeypatch.setattr(image_choice, "PROGRAMS", ("docker",))
    container_engine.engine_problem.cache_clear()
    try:
        problem = image_choice.builder_problem()
        assert problem.startswith(
            "no image builder is available; docker does not answer (permission denied while trying: x"
        )
        assert len(problem) < 180
        with pytest.raises(ValueError, match=r"image = 'build', but no image builder is available; docker does not"):
            image_choice.builder_for("build", Path("/"), Store(tmp_path))
        assert image_choice.builder_for("auto", Path("/"), Store(tmp_path)) is None
    finally:
        container_engine.engine_problem.cache_clear()
