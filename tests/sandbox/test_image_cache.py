"""Image cache: its content, its size limit, and leftovers of killed builds."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import leftovers
import pytest
from image_setup import BASE, needs_images
from patience import wait_until

from harbortrainer.cli import main
from harbortrainer.runs.locks import try_lock
from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.image_cache import ImageCache
from harbortrainer.sandbox.layer_store import Store
from harbortrainer.sandbox.task_image import Image

MB = 10**6


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def dockerfile(name: str) -> str:
    return f"FROM {BASE}\nRUN head -c 2M /dev/urandom > /{name}\n"


@needs_images
async def test_removes_least_recently_used_and_keeps_images_in_use(make_sandbox, cache):
    sandboxes = {
        name: await make_sandbox(dockerfile=dockerfile(name), image="build", cache_dir=str(cache))
        for name in ("in-use", "oldest", "newest")
    }
    for name in ("oldest", "newest"):
        await sandboxes[name].stop(delete=True)
    image_cache = ImageCache(Store(cache))
    assert len(image_cache.list_images()) == 3
    assert 6 * MB < image_cache.size() < 8 * MB
    (removed,) = await image_cache.shrink(5 * MB)
    assert removed.layers.keys() == set(sandboxes["oldest"]._image.lowers) & removed.layers.keys()
    assert image_cache.size() < 5 * MB
    assert (await sandboxes["in-use"].exec("head -c 1 /in-use | wc -c")).stdout == "1\n"
    again = await make_sandbox(dockerfile=dockerfile("oldest"), image="build", cache_dir=str(cache))
    assert (await again.exec("stat -c %s /oldest")).stdout == f"{2 << 20}\n"
    await again.stop(delete=True)
    await image_cache.shrink(0)
    layers_in_use = sandboxes["in-use"]._image.lowers
    assert [image.layers for image in image_cache.list_images()] == [
        {path: size for path, size in image_cache.list_images()[0].layers.items() if path in layers_in_use}
    ]


async def test_limit_holds_for_layers_on_host_root(make_sandbox, cache):
    for name in "ab":
        sandbox = await make_sandbox(
            dockerfile=f"FROM x\nRUN head -c 9M /dev/zero > /{name}\n", cache_dir=str(cache), images_gb=0.012
        )
        await sandbox.stop(delete=True)
    (remaining,) = ImageCache(Store(cache)).list_images()
    assert (Path(next(iter(remaining.layers))) / "upper/root/b").is_file()


BUILD_SCRIPT = """
import asyncio, sys
from pathlib import Path
from harbortrainer.runs.locks import try_lock
from harbortrainer.sandbox.images.buildah import Buildah
asyncio.run(Buildah(Path(sys.argv[1])).build(Path(sys.argv[2]), "localhost/harbortrainer/x", 600))
"""


@needs_images
async def test_image_is_inspected_under_build_lock(tmp_path, monkeypatch):
    lock_free, inspect_image = [], Buildah._inspect_image

    async def inspect_and_record_lock(self, name):
        with (tmp_path / "store/.building.lock").open("a") as file:
            lock_free.append(try_lock(file))
        return await inspect_image(self, name)

    monkeypatch.setattr(Buildah, "_inspect_image", inspect_and_record_lock)
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nENV A=1\n")
    image = await Buildah(tmp_path / "store").build(tmp_path, "localhost/harbortrainer/one", 600)
    assert image.env["A"] == "1"
    await Buildah(tmp_path / "store").pull(BASE, 600)
    assert lock_free == [False, False]


@needs_images
async def test_killed_build_leaves_no_process_and_no_layer(make_sandbox, cache):
    slow_dockerfile = f"FROM {BASE}\nRUN touch /begun; for i in 1 2 3; do sleep 1{os.getpid()}; done\n"
    sandbox = await make_sandbox(dockerfile=slow_dockerfile, image="build", cache_dir=str(cache), start=False)
    store = Store(cache).own / "buildah"
    kill_running_build(store, sandbox.environment_dir, f"sleep 1{os.getpid()}")
    (sandbox.environment_dir / "Dockerfile").write_text(dockerfile("second"))
    await sandbox.start(force_build=False)
    assert (await sandbox.exec("ls /second /begun")).stdout == "/second\n"
    assert (store / "store/overlay-containers/containers.json").read_text().strip() in ("[]", "null", "")
    assert leftovers.unfinished(cache) == []


def kill_running_build(store: Path, context: Path, step_command: str) -> None:
    """Kill a build while this step runs, and wait until all its processes have ended."""
    builder = subprocess.Popen([sys.executable, "-c", BUILD_SCRIPT, str(store), str(context)])
    wait_until(lambda: matching_processes(step_command))
    builder.send_signal(signal.SIGKILL)
    builder.wait()
    wait_until(lambda: not matching_processes(step_command) and not matching_processes(str(store)))
    assert str(store) not in Path("/proc/mounts").read_text()


def matching_processes(pattern: str) -> list[str]:
    result = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return result.stdout.split()


def test_list_and_prune_commands(tmp_path, capsys):
    folder = Store(tmp_path).own / "layer" / "0123456789abcdef"
    (folder / "upper").mkdir(parents=True)
    (folder / "upper/file").write_bytes(b"x" * 3_000_000)
    Image(name="some-task").save(folder)
    assert main(["images", "list", "--cache-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "0123456789ab        3.0 MB" in output
    assert "some-task (layer on a root filesystem)\n1 cached, 0.00 GB in" in output
    assert main(["images", "prune", "--to", "0", "--cache-dir", str(tmp_path)]) == 0
    assert "1 removed, 0.00 GB remain" in capsys.readouterr().out
    assert not folder.exists()


@needs_images
async def test_rebuilt_base_image_is_used(tmp_path):
    system, builder = tmp_path / "system", Buildah(tmp_path / "own", tmp_path / "system")
    (tmp_path / "Dockerfile").write_text("FROM localhost/base\nWORKDIR /app\n")
    for content in ("one", "two"):
        make_base(system, tmp_path / "base", content)
        image = await builder.build(tmp_path, f"localhost/harbortrainer/{content}", 600)
        assert [text for layer in image.lowers for text in read_if_file(Path(layer) / "content")] == [content]


@needs_images
async def test_image_with_missing_base_is_pruned(tmp_path):
    system, builder = tmp_path / "system", Buildah(tmp_path / "own", tmp_path / "system")
    make_base(system, tmp_path / "base", "one")
    (tmp_path / "Dockerfile").write_text("FROM localhost/base\nCOPY Dockerfile /first\nCOPY Dockerfile /second\n")
    image = await builder.build(tmp_path, "localhost/harbortrainer/one", 600)
    assert set(image.lowers[:2]) == builder.layer_sizes().keys()
    await builder.prune(lambda: set(image.lowers))
    assert set(image.lowers[:2]) == builder.layer_sizes().keys(), "layers in use must stay"
    make_base(system, tmp_path / "base", "two")
    await builder.prune(set)
    assert builder.layer_sizes() == {}


@needs_images
async def test_unfinished_image_is_not_removed(tmp_path):
    store, key = Store(tmp_path / "cache"), "0123"
    builder, image_cache = Buildah(store.own / "buildah"), ImageCache(store)
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nCOPY Dockerfile /\n")
    await builder.build(tmp_path, f"localhost/harbortrainer/{key}", 600)
    unfinished = store.own / "image" / f".{key}.x.part"
    unfinished.mkdir(parents=True)
    with unfinished.with_name(f".{key}.lock").open("a") as file:
        assert try_lock(file)
        await image_cache.shrink(0)
        assert builder.layer_sizes(), "the image is built and has no record yet"
    with (builder.folder / ".building.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        await image_cache.shrink(0)
        assert builder.layer_sizes(), "a build is running"
    await image_cache.shrink(0)
    assert builder.layer_sizes() == {}


def make_base(store: Path, folder: Path, content: str) -> None:
    """Build the one-file image `localhost/base`, replacing any earlier image of that name."""
    folder.mkdir(exist_ok=True)
    (folder / "content").write_text(content)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY content /content\n")
    buildah = ["buildah", "--root", str(store), "--runroot", f"{store}-run", "--storage-driver", "overlay"]
    subprocess.run([*buildah, "rmi", "--all", "--force"], check=False, capture_output=True)
    subprocess.run([*buildah, "build", "-t", "localhost/base", str(folder)], check=True, capture_output=True)


def read_if_file(path: Path) -> list[str]:
    return [path.read_text()] if path.is_file() else []
