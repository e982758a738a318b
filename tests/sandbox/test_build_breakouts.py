"""RUN is in a sandbox, with every builder that runs as root: attempts to leave it, and honest instructions."""

import base64
import os
import re
import socket
import subprocess
import uuid
from pathlib import Path

import pytest
from image_setup import BASE, engine_marks, needs_images, own_podman_store
from ordinary_user import TUN, run_on_image

from harbortrainer.sandbox import network_choice
from harbortrainer.sandbox.errors_and_changes import SandboxBuildError
from harbortrainer.sandbox.images.buildah import Buildah
from harbortrainer.sandbox.images.container_engine import ContainerEngine
from harbortrainer.sandbox.layer_store import Store

NAME = "localhost/harbortrainer/breakout"
BUILDERS = [
    pytest.param("buildah", marks=needs_images),
    pytest.param("podman", marks=engine_marks("podman")),
]

# Each command succeeds only outside a sandbox. `FILE`, `PID` and `PORT` are the host's.
ATTEMPTS = {
    "chroot": """perl -e 'mkdir "/e"; chdir "/"; chroot "/e" or exit 1;
        chdir ".." for 1 .. 64; chroot "."; exit !-e "FILE"'""",
    "chroot by open folder": """perl -e 'opendir D, "/"; mkdir "/f"; chroot "/f" or exit 1;
        chdir D; chdir ".." for 1 .. 64; chroot "."; exit !-e "FILE"'""",
    "file of the host": "test -e FILE",
    "root of process 1": "test -e /proc/1/root/FILE",
    "mount of a filesystem": "mkdir -p /m && mount -t tmpfs none /m",
    "mount of /proc": "mkdir -p /m && mount -t proc none /m",
    "bind mount": "mkdir -p /m && mount --bind /etc /m",
    "remount of /proc/sys": "mount -o remount,rw,bind /proc/sys",
    "unmount": "umount /proc/sys || umount /etc/hosts",
    "namespaces": "unshare -m true || unshare -U true || unshare -n true",
    "host's namespaces": "nsenter -t 1 -m test -e FILE",
    "device node": "mknod /d b 254 0 && head -c 1 /d",
    "disk device": "ls /dev/vda /dev/sda /dev/nvme0n1 2>/dev/null | grep -q .",
    "memory device": "head -c 1 /dev/mem || head -c 1 /dev/kmem || head -c 1 /proc/kcore",
    "kernel log": "head -c 1 /dev/kmsg || dmesg | grep -q .",
    "process of the host": "kill -0 PID",
    "trace of a process of the host": "perl -e 'exit syscall(101, 16, PID, 0, 0) != 0'",
    "memory of the host's processes": "head -c 1 /proc/PID/environ",
    "core pattern": "echo '|/bin/true' > /proc/sys/kernel/core_pattern",
    "sysrq": "echo h > /proc/sysrq-trigger",
    "sysctl": "echo 1 > /proc/sys/vm/drop_caches",
    "host's name": "hostname escaped",
    "uevent helper": "echo /bin/true > /sys/kernel/uevent_helper",
    "release agent": "mkdir -p /c && mount -t cgroup -o rdma cgroup /c || find / -name release_agent | grep -q .",
    "kernel module": "perl -e 'exit syscall(175, 0, 0, \"\") != 0'",
    "file handle": 'perl -e \'$h = "\\0" x 128; exit syscall(303, -100, "/", $h, $i = 0, 0) < 0\'',
    "bpf": "perl -e '$a = \"\\0\" x 128; exit syscall(321, 0, $a, 128) < 0'",
    "keyring": "perl -e 'exit syscall(250, 0, -3, 1) < 0'",
    "clock": "date -s 2001-01-01",
    "raw socket": "perl -MSocket -e 'socket(S, AF_INET, SOCK_RAW, 1) or exit 1'",
    "host's localhost": "perl -MIO::Socket::INET -e 'IO::Socket::INET->new(\"127.0.0.1:PORT\") or exit 1'",
    "host's abstract socket": """perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0);
        connect(S, pack("Sa*", AF_UNIX, "\\0harbortrainer-test")) or exit 1'""",
    "host's variable": 'test -n "$BUILD_CANARY"',
}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Values of the attempts: a file, a process, a TCP port and an abstract socket of the host."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    monkeypatch.setenv("BUILD_CANARY", "canary")
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0harbortrainer-test")
    abstract.listen()
    with socket.create_server(("127.0.0.1", 0)) as server, abstract:
        yield {"FILE": str(secret), "PID": str(os.getpid()), "PORT": str(server.getsockname()[1])}


def _script(host: dict[str, str]) -> str:
    """Return a script that lists the attempts that succeed in /results."""
    lines = ["touch /results"]
    for name, command in ATTEMPTS.items():
        for key, value in host.items():
            command = command.replace(key, value)
        lines.append(f"if ( {command} ) >/dev/null 2>&1; then echo {name!r} >> /results; fi")
    return "\n".join(lines) + "\n"


RUN_ATTEMPTS = "RUN timeout 100 sh /attempts.sh && echo end >> /results\n"
DOCKERFILE = f"FROM {BASE}\nCOPY attempts.sh /attempts.sh\n{RUN_ATTEMPTS}"
needs_own_network = pytest.mark.skipif(
    bool(network_choice.slirp_problem()), reason="without slirp4netns a build shares this machine's network"
)


def _builder(name: str, folder: Path) -> Buildah | ContainerEngine:
    return Buildah(folder / "store") if name == "buildah" else ContainerEngine("podman", Store(folder / "store"))


@pytest.fixture(params=BUILDERS)
async def build(request, tmp_path, tmp_path_factory):
    """Build a Dockerfile with files and return its layers, topmost first."""
    builder, context = _builder(request.param, tmp_path), tmp_path / "context"

    async def run(files: dict[str, str]) -> list[Path]:
        context.mkdir()
        for name, text in files.items():
            (context / name).write_text(text)
        # The system's store may have the steps of an earlier build.
        text = re.sub("(?m)^FROM .*$", rf"\g<0>\nENV BUILD={uuid.uuid4().hex}", files["Dockerfile"])
        (context / "Dockerfile").write_text(text)
        image = await builder.build(context, NAME, 300)
        return [Path(layer) for layer in image.lowers]

    with own_podman_store(request.param, tmp_path_factory):
        yield run
        await builder.remove(NAME)


def _read(layers: list[Path], path: str) -> str:
    return next(layer / path for layer in layers if (layer / path).exists()).read_text()


@needs_own_network
async def test_no_attempt_leaves_build_of_image(build, host):
    layers = await build({"Dockerfile": DOCKERFILE, "attempts.sh": _script(host)})
    assert _read(layers, "results") == "end\n"


@needs_own_network
async def test_no_attempt_leaves_build_on_hosts_root(make_sandbox, host):
    sandbox = await make_sandbox(dockerfile=DOCKERFILE, files={"attempts.sh": _script(host)})
    found = await sandbox.exec("cat /results")
    assert (found.return_code, found.stdout) == (0, "end\n")


@needs_own_network
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user")
def test_no_attempt_leaves_ordinary_users_build(host):
    script = base64.b64encode(_script(host).encode()).decode()
    dockerfile = f"FROM {BASE}\nRUN echo {script} | base64 -d > /attempts.sh\n{RUN_ATTEMPTS}"
    output = run_on_image(dockerfile, "cat /results", prepare=TUN, IMAGE="host")
    assert output[0] == "end"


def test_attempts_succeed_outside_sandbox(host, tmp_path):
    """Several attempts, run on the host, reach what they look for; otherwise they would prove nothing."""
    for name in ("file of the host", "process of the host", "host's localhost", "host's abstract socket"):
        command = ATTEMPTS[name]
        for key, value in host.items():
            command = command.replace(key, value)
        assert subprocess.run(["sh", "-c", command], check=False, capture_output=True).returncode == 0, name


REFUSED = re.compile("RUN mounts /seen from .* of this machine|invalid mount|bind mounting bind object")
"""The sandbox refuses a mount, or the builder does."""


async def _expect_no_escape(build, dockerfile: str) -> None:
    try:
        layers = await build({"Dockerfile": dockerfile})
    except SandboxBuildError as error:
        assert REFUSED.search(str(error)), error
    else:
        assert _read(layers, "results") == "end\n"


@pytest.mark.parametrize("source", ["/", "/var", "/proc/1/root"])
async def test_link_in_image_mounts_nothing_of_host(build, source, host):
    """buildah 1.28 binds what a link of an image leads to on the host (CVE-2024-1753)."""
    dockerfile = f"""\
FROM {BASE} AS planted
RUN ln -s {source} /planted
FROM {BASE}
RUN --mount=type=bind,from=planted,source=/planted,target=/seen,rw \\
    if test -e /seen{host["FILE"]} || test -e /seen/lib/containers; then echo escaped > /results; fi; \\
    echo end >> /results
"""
    await _expect_no_escape(build, dockerfile)


@pytest.mark.parametrize("identifier", ["../../../../../../../etc", "/../../../../../../../../etc"])
async def test_cache_of_run_is_no_folder_of_host(build, identifier):
    dockerfile = f"""\
FROM {BASE}
RUN --mount=type=cache,id={identifier},target=/seen if test -e /seen/hostname; then echo escaped > /results; fi; \\
    echo end >> /results
"""
    await _expect_no_escape(build, dockerfile)


HONEST = f"""\
FROM {BASE} AS tools
RUN mkdir /tools && echo tool > /tools/tool
FROM {BASE} AS database
RUN mkdir /data && echo kept > /data/kept
VOLUME /data
RUN cat /data/kept > /seen-data && touch /data/more
FROM database
ARG WHO=world
ENV GREETING="hello ${{WHO}}"
RUN useradd -m worker && install -d -o worker -g worker /work && rm -rf /var/spool && ln -s /work /var/spool
RUN mkdir -p /data && cat /data/kept > /work/volume
RUN --mount=type=bind,from=tools,source=/tools/tool,target=/seen cat /seen > /work/bound
RUN --mount=type=bind,source=note,target=/note cat /note > /work/note
RUN --mount=type=tmpfs,target=/var/spool/fast touch /var/spool/fast/a && test -d /work/fast
RUN --mount=type=cache,target=/cache echo kept > /cache/kept && cat /cache/kept > /work/cache
SHELL ["/bin/bash", "-c"]
RUN cat <<< "$GREETING" > /work/greeting && touch /dev/shm/x && setpriv --reuid 1 --clear-groups id -u > /work/user
RUN cp /bin/chmod /usr/local/bin/set && chmod u+s /usr/local/bin/set
WORKDIR /work/deep
USER worker:games
RUN id -un > who; id -gn >> who; pwd >> who; echo "$HOME" >> who
RUN set 4711 /usr/local/bin/set
"""


WORK = {
    "volume": "kept\n",
    "bound": "tool\n",
    "note": "note\n",
    "cache": "kept\n",
    "greeting": "hello world\n",
    "user": "1\n",
}


async def test_honest_instructions_work(build):
    layers = await build({"Dockerfile": HONEST, "note": "note\n"})
    work = {name: _read(layers, f"work/{name}") for name in WORK}
    assert work == WORK
    assert _read(layers, "work/deep/who") == "worker\ngames\n/work/deep\n/home/worker\n"
    assert not any((layer / "note").exists() and (layer / "note").stat().st_size for layer in layers)
    assert not any((layer / "var/spool").is_dir() and not (layer / "var/spool").is_symlink() for layer in layers[:1])


async def test_failed_instruction_shows_its_output(build):
    with pytest.raises(SandboxBuildError, match=r"what went wrong[\s\S]*exit status 3"):
        await build({"Dockerfile": f"FROM {BASE}\nRUN echo what went wrong; exit 3\n"})
