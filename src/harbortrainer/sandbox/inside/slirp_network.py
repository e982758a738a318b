"""Connection of a sandbox's own network namespace to other machines, through slirp4netns.

Each sandbox has its own ports and loopback. It reaches other machines, but not this machine's loopback. slirp4netns
runs next to the sandbox's monitor, unprivileged and behind a seccomp filter, and ends with it.
"""

import os
import select
import signal

from harbortrainer.sandbox.inside import mask_layers
from harbortrainer.sandbox.inside import syscalls as k

_BLOCK = "198.19.214"  # from the range reserved for benchmarks (RFC 2544), which no network should use
RESOLVER = f"{_BLOCK}.3"
"""Address of the DNS forwarder, which queries this machine's resolvers."""
_OPTIONS = ("--configure", f"--cidr={_BLOCK}.0/24", "--mtu=65520", "--disable-host-loopback", "--netns-type=path")
_CONFINED = ("--enable-sandbox", "--enable-seccomp")
_READY_S = 10.0


class SlirpNetwork:
    """slirp4netns of one sandbox.

    Create it before the sandbox's process namespace: later children belong to the sandbox. The mount namespace must
    share no mounts with others, because slirp4netns unmounts everything that it sees.

    Args:
        program: The path of slirp4netns.
    """

    def __init__(self, program: str) -> None:
        self._stderr = os.memfd_create("slirp4netns", os.MFD_CLOEXEC)
        start_read, self._start_write = os.pipe()
        self._ready, ready_write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._exec_slirp(program, start_read, ready_write)
        os.close(start_read)
        os.close(ready_write)
        self.ended = os.pidfd_open(self._pid)
        """A pidfd, readable when slirp4netns has ended."""

    def _exec_slirp(self, program: str, start_read: int, ready_write: int) -> None:
        """Wait for the network's path and execute slirp4netns. Runs in the forked child and never returns."""
        try:
            os.dup2(self._stderr, 2)
            low, high = sorted((start_read, ready_write))
            for begin, end in ((3, low), (low + 1, high), (high + 1, 4096)):
                os.closerange(begin, end)  # above all the sandbox's control socket
            if path := os.read(start_read, 100).decode():
                for fd in (low, high):
                    os.set_inheritable(fd, True)
                # slirp4netns exits when the write end of the start pipe is closed.
                options = f"--ready-fd={ready_write}", f"--exit-fd={start_read}"
                os.execv(program, [program, *_OPTIONS, *_CONFINED, *options, path, "tap0"])
        except OSError as error:
            os.write(2, str(error).encode())
        finally:
            os._exit(1)

    def open(self, pid: int) -> None:
        """Connect the network namespace of a process.

        Raises:
            OSError: slirp4netns did not become ready; the message has its output.
        """
        os.write(self._start_write, f"/proc/{pid}/ns/net".encode())
        if not (select.select([self._ready], [], [], _READY_S)[0] and os.read(self._ready, 1)):
            lines = os.pread(self._stderr, 2000, 0).decode(errors="replace").splitlines()
            output = "; ".join(filter(None, lines)) or "it printed nothing"
            raise OSError(f"slirp4netns could not connect the sandbox's network: {output}")

    def kill(self) -> None:
        """Kill it without waiting."""
        os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, wait for its end, and close the descriptors."""
        self.kill()
        os.waitpid(self._pid, 0)
        for fd in (self.ended, self._start_write, self._ready, self._stderr):
            os.close(fd)


def main(program: str) -> None:
    """Test slirp4netns once on a new network namespace.

    Raises:
        OSError: The namespace cannot be created, or slirp4netns cannot connect it.
    """
    mask_layers.enter_namespace(privileged=os.geteuid() == 0)
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        k.die_with_parent()
        os.unshare(os.CLONE_NEWNET)
        os.write(there, b"n")
        signal.pause()
    os.close(there)
    if not os.read(here, 1):
        raise OSError("cannot create a network namespace")
    network = SlirpNetwork(program)
    network.open(pid)
    network.close()
