"""OCI runtime that runs a builder's RUN instruction in a sandbox.

buildah and podman start the file that `images.build_support.write_runtime` writes. `create` starts the process that
they wait for: it runs the sandbox on the root filesystem of their bundle and ends with the instruction's exit code.

Invariants:
- The instruction has the isolation of every sandbox: its own namespaces, few capabilities, a system call filter, and no
  file of the host but the bundle's mounts.
- A mount comes from the task's folder, an image, or the builder's caches and volumes. Builders do not always check
  that: buildah 1.28 mounts any folder of the host for a planted link, or for `..` in the name of a cache.
- The sandbox ends with this process.
"""

import json
import os
import re
import socket
import sys

from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside import syscalls as k
from harbortrainer.sandbox.inside.monitor import Monitor
from harbortrainer.sandbox.inside.slirp_network import RESOLVER

VARIABLE = "HARBORTRAINER_BUILD"
"""Variable with the settings as JSON: `folders` from which a mount may come, `stores` of images, `slirp4netns_path`."""
_OWN_MOUNTS = ("/dev", "/proc", "/sys")
_RESOLVERS, _HOSTS = "/etc/resolv.conf", "/etc/hosts"
_PIDS = 4096
_SHARED_MEMORY_MB = 1024
_FAILED = 125


def main(arguments: list[str]) -> None:
    """Start the process that runs the bundle's command, and write its id into the file `pid` of the bundle."""
    bundle = arguments[arguments.index("--bundle") + 1]
    pid_file = arguments[arguments.index("--pid-file") + 1]
    if pid := os.fork():
        with open(pid_file, "w") as file:
            file.write(str(pid))
        os._exit(0)
    try:
        code = _run(bundle)
    except Exception as error:  # noqa: BLE001 (the process's last frame: the builder prints the output)
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        sys.stderr.write(f"sandbox: {kind}{error}\n")
        code = _FAILED
    sys.stderr.flush()
    os._exit(code)


def _run(bundle: str) -> int:
    """Run the bundle's command in a sandbox and return its exit code."""
    with open(f"{bundle}/config.json") as file:
        config = json.load(file)
    settings = json.loads(os.environ[VARIABLE])
    spec = _sandbox_spec(bundle, config, settings)
    # slirp4netns unmounts what it sees, so nothing may be shared.
    os.unshare(os.CLONE_NEWNS)
    k.mount("none", "/", None, k.MS_REC | k.MS_PRIVATE)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monitor = os.fork()
    if monitor == 0:
        here.close()
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        Monitor(spec, None, there, privileged=True).run()
        os._exit(0)
    there.close()
    code = _serve(here, _command(config["process"]))
    here.close()
    os.waitpid(monitor, 0)
    return code


def _command(process: dict) -> m.Command:
    user = process.get("user") or {}
    uid, gid = user.get("uid", 0), user.get("gid", 0)
    return m.Command(
        process["args"],
        cwd=process.get("cwd") or "/",
        env=dict(entry.split("=", 1) for entry in process.get("env") or [] if "=" in entry),
        user=uid,
        groups=[gid, *(user.get("additionalGids") or [])] if (uid, gid) != (0, 0) else None,
        id=1,
    )


def _sandbox_spec(bundle: str, config: dict, settings: dict) -> m.SandboxSpec:
    binds, read_only = {}, []
    for number, mount in enumerate(config.get("mounts") or []):
        target = os.path.normpath(mount["destination"])
        if any(target == own or target.startswith(own + "/") for own in _OWN_MOUNTS):
            continue
        if mount.get("type") == "tmpfs":
            source = f"{bundle}/tmpfs{number}"
            os.mkdir(source)
            os.chmod(source, 0o1777)
        else:
            source = mount["source"]
            _check_source(target, source, [*settings["folders"], bundle], settings["stores"])
        binds[target] = source
        if "ro" in (mount.get("options") or []):
            read_only.append(target)
    alone = any(kind == {"type": "network"} for kind in config["linux"].get("namespaces") or [])
    slirp4netns_path = "" if alone else settings["slirp4netns_path"]
    if slirp4netns_path and _RESOLVERS in binds:
        binds[_RESOLVERS] = _write(f"{bundle}/resolv.conf", f"nameserver {RESOLVER}\n")
    if _HOSTS in binds:
        with open(binds[_HOSTS]) as file:
            binds[_HOSTS] = _write(f"{bundle}/hosts", file.read() + m.OWN_ADDRESS)
    root = config["root"]["path"]
    return m.SandboxSpec(
        rootfs=root if os.path.isabs(root) else f"{bundle}/{root}",
        in_place=True,
        binds=binds,
        read_only=read_only,
        network=not alone and not slirp4netns_path,
        slirp4netns_path=slirp4netns_path,
        disk_mb=_SHARED_MEMORY_MB,
        pids=_PIDS,
    )


def _write(path: str, text: str) -> str:
    with open(path, "w") as file:
        file.write(text)
    return path


class _Mounts:
    """Where paths of this mount namespace lie: the filesystem's device, and the path in that filesystem."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}  # mount point -> device, path of its root in the filesystem
        with open("/proc/self/mountinfo") as file:
            for line in file:
                _, _, device, root, point, *_ = line.split()
                self._found[_decode(point)] = device, _decode(root)

    def origin(self, path: str) -> tuple[str, str]:
        real = os.path.realpath(path)
        point = max((point for point in self._found if _is_below(real, point)), key=len)
        device, root = self._found[point]
        return device, os.path.normpath(os.path.join(root, os.path.relpath(real, point)))

    def image_devices(self, stores: list[str]) -> set[str]:
        """Return the devices of the images that are mounted from the stores."""
        points = (point for point in self._found if point.endswith("/merged"))
        return {self._found[point][0] for point in points if any(_is_below(point, store) for store in stores)}


def _decode(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _check_source(target: str, source: str, folders: list[str], stores: list[str]) -> None:
    """Raise PermissionError if a mount comes from elsewhere than the folders and the mounted images.

    The builder has already bound the source to a name in its bundle, so its path says nothing.
    """
    mounts = _Mounts()
    device, path = mounts.origin(source)
    allowed = (mounts.origin(folder) for folder in folders)
    if device in mounts.image_devices(stores) or any(device == own and _is_below(path, top) for own, top in allowed):
        return
    raise PermissionError(f"RUN mounts {target} from {path} of this machine, outside the task's folder and the images")


def _serve(control: socket.socket, command: m.Command) -> int:
    """Start the command once the sandbox is ready; return its exit code."""
    while True:
        packet, fds = m.receive(control, 3)
        for fd in fds:
            os.close(fd)
        if not packet:
            raise ConnectionError("the sandbox ended before its command")
        match m.decode(packet):
            case m.Ready():
                m.send(control, command, [0, 1, 2])
            case m.Ended(_, code):
                return code
            case m.Failed(error):
                raise OSError(error)
            case m.Note(text):
                sys.stderr.write(f"sandbox: {text}\n")
