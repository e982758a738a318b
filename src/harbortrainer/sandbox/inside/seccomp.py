"""Seccomp filter: the system calls that no process of a sandbox may make.

Capabilities and namespaces already isolate most of the kernel. The filter covers the rest: socket families that network
namespaces do not contain (vsock reaches a virtual machine's host), and large kernel interfaces that tasks do not need.
Leases are refused as by a file system without them: a lease makes other processes wait for up to 45 s to open a file.
Programs of another architecture (32 bit) do not run, because their call numbers differ.
"""

import os
import struct

from harbortrainer.sandbox.inside import syscalls as k

# Column of _DENIED, mark, socket(2), fcntl(2).
_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 41, 72), "aarch64": (1, 0xC00000B7, 198, 25)}
_DENIED = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_MEMFD_CALLS = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
_ALLOWED_SOCKETS = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink
_LEASES = (1024, 1040)  # F_SETLEASE, F_SETDELEG
_EINVAL, _ENOSYS, _EAFNOSUPPORT = 22, 38, 97
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_X32_BIT = 0x40000000


def build_filter(*, allow_memfd: bool) -> bytes:
    """Return the filter as the kernel's struct sock_filter[]; empty on an unknown architecture."""
    if (known := _ARCHITECTURES.get(os.uname().machine)) is None:
        return b""
    column, architecture, socket, fcntl = known
    denied = _DENIED if allow_memfd else _DENIED | _MEMFD_CALLS
    numbers = sorted(numbers[column] for numbers in denied.values())
    # Jumps are relative and forward: the refusals and the permission are at the end.
    lines: list[tuple[int, str, str, int]] = [
        (_LOAD, "", "", _ARCHITECTURE),
        (_EQUAL, "", "enosys", architecture),
        (_LOAD, "", "", _NUMBER),
        (_GREATER_EQUAL, "enosys", "", _X32_BIT),
        *((_EQUAL, "enosys", "", number) for number in numbers),
        (_EQUAL, "fcntl", "", fcntl),
        (_EQUAL, "", "allow", socket),
        (_LOAD, "", "", _FIRST_ARGUMENT),
        *((_EQUAL, "allow", "", family) for family in _ALLOWED_SOCKETS),
        (_RETURN, "", "", _ERRNO | _EAFNOSUPPORT),
        (_LOAD, "", "", _SECOND_ARGUMENT),
        *((_EQUAL, "einval", "", command) for command in _LEASES),
        (_RETURN, "", "", _ALLOW),
        (_RETURN, "", "", _ERRNO | _EINVAL),
        (_RETURN, "", "", _ERRNO | _ENOSYS),
    ]
    ends = {"fcntl": len(lines) - 6, "allow": len(lines) - 3, "einval": len(lines) - 2, "enosys": len(lines) - 1}

    def jump(line: int, label: str) -> int:
        return ends[label] - line - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", code, jump(line, yes), jump(line, no), value)
        for line, (code, yes, no, value) in enumerate(lines)
    )


def apply(*, allow_memfd: bool) -> None:
    """Apply the filter to this process and its later children. Needs no-new-privileges or CAP_SYS_ADMIN.

    Args:
        allow_memfd: Allow memfd files. Only a control group can limit the memory that they hold.
    """
    if code := build_filter(allow_memfd=allow_memfd):
        k.set_seccomp_filter(code)
