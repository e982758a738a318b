"""Messages between the trainer's process, the fork server and a sandbox's init process: one JSON packet each.

A long one is sent as a file. All three import this module, so it uses only light parts of the standard library.
Invariant: `decode(encode(message)) == message`.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

SANDBOX_TITLE = "harbortrainer-sandbox"
"""Begins a sandbox's line in the host's process list; the owner's process id and the sandbox's name follow."""
HOST_NAME = "sandbox"
"""The host name of every sandbox."""
OWN_ADDRESS = f"127.0.1.1\t{HOST_NAME}\n"
"""Line of /etc/hosts by which the host name resolves, as in Docker."""
NAME_FILES = {
    "/etc/hosts": f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n{OWN_ADDRESS}",
    "/etc/hostname": f"{HOST_NAME}\n",
}
"""Files with the names of a sandbox: content by path."""


@dataclass(frozen=True, kw_only=True)
class HostView:
    """The part of the host's root filesystem that sandboxes see (built by `harbortrainer.sandbox.host_view`)."""

    shown: list[str]
    """Visible folders."""

    plain: list[str]
    """Files outside the visible folders, which are copied."""

    links: dict[str, str]
    """Links outside the visible folders: target by path."""

    folders: dict[str, int]
    """Folders that contain the visible ones: mode by path."""

    hidden: list[str]
    """Folders inside the visible ones that appear empty."""

    files: dict[str, str]
    """Files inside the visible folders with replaced content."""

    modes: dict[str, int]
    """Modes of the folders that contain hidden entries."""

    key: str = ""
    """Hash of all other fields."""


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """Configuration of one sandbox."""

    name: str = ""
    """The sandbox's name in the host's process list."""

    rootfs: str = "/"
    """The root filesystem."""

    lowers: list[str] = field(default_factory=list)
    """Layers of an image, topmost first; they replace `rootfs`."""

    view: str | None = None
    """Key of the `HostView`, which the fork server already has; None if `rootfs` is not the host's."""

    layer: str | None = None
    """Folder with the files that a Dockerfile adds to the root filesystem."""

    small: bool = False
    """Copy `layer` into the sandbox instead of mounting it."""

    upper: str | None = None
    """Folder that receives the changes while an image is built; None keeps them in memory."""

    in_place: bool = False
    """Write the changes into `rootfs` itself, where an image builder expects them."""

    binds: dict[str, str] = field(default_factory=dict)
    """Bind mounts: host path by path inside."""

    read_only: list[str] = field(default_factory=list)
    """Paths of `binds` that are read-only."""

    dirs: list[str] = field(default_factory=list)
    """Folders to create, writable by all users."""

    files: dict[str, str] = field(default_factory=dict)
    """Files to write: content by path."""

    search_path: str = ""
    """PATH of the image's commands."""

    image_tools: bool = False
    """Show the verifier the system folders as the sandbox starts with them, not as the agent leaves them."""

    work_dir: str = ""
    """The agent's working folder. The verifier sees it as the agent leaves it, even below a system folder."""

    network: bool = False
    """Share the host's network; else the sandbox has its own."""

    slirp4netns_path: str = ""
    """Path of slirp4netns, which connects the sandbox's own network; "" leaves only a loopback device."""

    disk_mb: int = 64
    memory_bytes: int = 512 << 20
    pids: int = 64
    cpu_us: int | None = None
    """Microseconds of CPU in each 100 ms."""

    @property
    def builds_image(self) -> bool:
        """Whether the changes become part of an image."""
        return self.in_place or self.upper is not None

    @property
    def isolates_agent(self) -> bool:
        """Whether the agent's commands get their own namespaces, apart from grading commands."""
        return not self.builds_image

    @property
    def has_verifier_root(self) -> bool:
        """Whether grading commands get their own root, with the system folders that the sandbox starts with."""
        return self.image_tools and self.isolates_agent


@dataclass(frozen=True)
class Command:
    """Start a command. Carries three descriptors: its standard input, output and error."""

    argv: list[str]
    call: bool = False
    """Whether `argv` is a call of `file_calls` with its arguments, not a program."""

    cwd: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    groups: list[int] | None = None
    """Group ids, the primary one first; None looks them up in /etc/passwd and /etc/group."""
    id: int = -1


@dataclass(frozen=True)
class Kill:
    """Kill a command with its process group."""

    id: int


@dataclass(frozen=True)
class Grading:
    """Begin or end grading. Answered with `Ended`."""

    begins: bool
    kill: bool = False
    """Kill all running processes even if no limit was exhausted."""

    id: int = -1


@dataclass(frozen=True)
class ReportChanges:
    """Report the files that changed since the agent started. Answered with `Changes`, then with `Ended`."""

    id: int = -1


@dataclass(frozen=True)
class Changes:
    """Files that changed in the sandbox since the agent started."""

    paths: list[str]
    """The first `overlay_diff.MAX_LISTED` paths."""

    change_types: list[str]
    """For each path `added`, `changed` or `removed`."""

    sizes: list[int]
    """For each path its bytes; 0 if it was removed."""

    before: list[str | None]
    """For each path the text before the agent started; None if it is not kept."""

    after: list[str | None]
    """For each path the text now; None if it is not kept."""

    total: int
    """Number of all changed files."""

    tools: list[str]
    """Descriptions of the changes to tools that a verifier uses."""


@dataclass(frozen=True)
class Listen:
    """Listen on `port` of the sandbox's loopback. Answered with `Listening`, then with `Ended`."""

    port: int
    id: int = -1


@dataclass(frozen=True)
class Listening:
    """Carries the listening socket."""


@dataclass(frozen=True)
class Note:
    """An event that a process in the sandbox caused: a limit was reached, or processes were killed for it."""

    text: str
    is_evidence: bool = True
    """Whether it can explain that grading failed. A limit that was reached while an agent runs cannot."""


@dataclass(frozen=True)
class Ready:
    """The sandbox has started."""


NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Codes of a command that could not be started."""
ERROR_PREFIX = b"sandbox: "
"""Begins the error output of such a command."""


@dataclass(frozen=True)
class Ended:
    """A command ended. A code above 128 is 128 + the signal that ended it."""

    id: int
    code: int


@dataclass(frozen=True)
class Failed:
    """A command could not be started; without an `id`, the sandbox itself failed."""

    error: str
    id: int | None = None


type Message = (
    HostView
    | SandboxSpec
    | Command
    | Kill
    | Grading
    | ReportChanges
    | Changes
    | Listen
    | Listening
    | Note
    | Ready
    | Ended
    | Failed
)
_ALL_TYPES = (
    *(HostView, SandboxSpec, Command, Kill, Grading, ReportChanges, Changes, Listen, Listening),
    *(Note, Ready, Ended, Failed),
)
_TYPES = {kind.__name__: kind for kind in _ALL_TYPES}


_LONGEST_PACKET = 64 << 10
_IN_FILE = b"f"  # stands for a packet that is in the last descriptor


def encode(message: Message) -> bytes:
    """Encode a message as a packet."""
    return json.dumps([type(message).__name__, vars(message)]).encode()


def decode(packet: bytes) -> Message:
    """Decode the message of a packet."""
    kind, fields = json.loads(packet)
    return _TYPES[kind](**fields)


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message with descriptors."""
    send_packet(sock, encode(message), fds)


def send_packet(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send an encoded message with descriptors.

    A long packet is sent as a file: the kernel refuses a packet that is larger than the socket's buffer.
    """
    if len(packet) <= _LONGEST_PACKET:
        socket.send_fds(sock, [packet], fds)
        return
    with os.fdopen(os.memfd_create("message", os.MFD_CLOEXEC), "wb") as file:
        file.write(packet)
        file.flush()
        socket.send_fds(sock, [_IN_FILE], [*fds, file.fileno()])


def receive(sock: socket.socket, max_fds: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive the next encoded message with its descriptors; an empty one means end of file.

    The size is peeked first: a buffer for the largest packet would be mapped and unmapped each time.
    """
    size = sock.recv_into(bytearray(1), 1, socket.MSG_PEEK | socket.MSG_TRUNC)
    packet, fds, _, _ = socket.recv_fds(sock, size, max_fds + 1, flags)
    if packet == _IN_FILE:
        file = fds.pop()
        try:
            packet = os.pread(file, os.fstat(file).st_size, 0)  # an error for anything but a file, and no wait
        finally:
            os.close(file)
    return packet, fds
