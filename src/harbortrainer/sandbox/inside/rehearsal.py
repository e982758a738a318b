"""What every sandbox does, done a few times by the nursery before it starts any.

An interpreter makes code faster as it runs, and looks some things up once: done here, the processes of all sandboxes
share it. Done in each, every page of memory that this writes to is copied first.

Invariant: nothing outside the given folder is changed, and no process is started, signalled or ended.
"""

import os
import socket
from dataclasses import replace

from harbortrainer.sandbox.inside import file_calls, layer_copy, processes, seccomp, spawn
from harbortrainer.sandbox.inside import messages as m
from harbortrainer.sandbox.inside.command_runner import CommandRunner
from harbortrainer.sandbox.inside.upper_layer import UpperLayer

_TIMES = 3  # what is run so often is as fast as it gets


def rehearse(folder: str) -> None:
    """Do it, in a folder that is made and removed."""
    for _ in range(_TIMES):
        os.makedirs(f"{folder}/upper/root")
        _write(f"{folder}/upper/root/file")
        _calls(folder)
        _look(folder)
        processes.session(os.getpid())
        processes.threads(os.getpid())
        for filtered in (False, True):
            seccomp.program(nameless_files=filtered)
        file_calls.empty([], "", folder)
        os.rmdir(folder)


def _calls(folder: str) -> None:
    """Ask for calls as the trainer's process does, and carry them out as a first process does."""
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runner = CommandRunner(asked, make_room=lambda: None)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    archive = os.memfd_create("rehearsal", os.MFD_CLOEXEC)
    upper = f"{folder}/upper"
    calls = [
        ["pack", upper, str(1 << 20)],
        ["unpack", f"{folder}/new"],
        ["empty", "777", f"{folder}/new"],
        ["is", "d", upper],
        ["executable", f"{upper}/root/file"],
    ]
    for call in calls:
        os.lseek(archive, 0, os.SEEK_SET)
        socket.send_fds(asking, [m.encode(m.Command(call, call=True))], [archive, archive, null])
        packet, fds = m.receive(asked, 3)
        command = m.decode(packet)
        assert isinstance(command, m.Command)
        runner.do(replace(command, id=0), fds, spawn.AGENTS_ORDER)
        m.decode(m.receive(asking, 1)[0])
        for fd in fds:
            os.close(fd)
    layer_copy.copy_tree(upper, f"{folder}/new")
    spawn.find_user("0")
    for fd in (null, archive):
        os.close(fd)
    asking.close()
    asked.close()


def _look(folder: str) -> None:
    """Look what was changed, as a monitor does."""
    disk = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    layer = UpperLayer(m.SandboxSpec(), None, disk)
    layer.mark()
    _write(f"{folder}/upper/root/file")
    m.encode(layer.look())
    os.close(disk)


def _write(path: str) -> None:
    with open(path, "w") as file:
        file.write(".")
