"""The system calls that a sandbox may not make, as a filter that the kernel applies to everything in it.

Capabilities and namespaces hold most things off already. This closes what they leave open: sockets that no network
namespace contains (a virtual machine's vsock reaches its host), and large parts of the kernel that tasks do not need.
Programs of another architecture (32 bit) do not run, since their calls have other numbers.
"""

import os
import struct

from harbortrainer.sandbox.inside import kernel as k

_ARCHITECTURES = {"x86_64": (0, 0xC000003E, 41), "aarch64": (1, 0xC00000B7, 198)}  # column of _DENIED, mark, socket(2)
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
_NAMELESS_FILES = {"memfd_create": (319, 279), "memfd_secret": (447, 447)}
_ALLOWED_SOCKETS = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink
_ENOSYS, _EAFNOSUPPORT = 38, 97
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32_BIT = 0x40000000


def program(*, nameless_files: bool) -> bytes:
    """The filter, as the kernel's struct sock_filter[]; empty on an architecture that is not known here."""
    if (known := _ARCHITECTURES.get(os.uname().machine)) is None:
        return b""
    column, architecture, socket = known
    denied = _DENIED if nameless_files else _DENIED | _NAMELESS_FILES
    numbers = sorted(numbers[column] for numbers in denied.values())
    # Jumps are relative and forward: the two refusals and the permission are at the end.
    lines: list[tuple[int, str, str, int]] = [
        (_LOAD, "", "", _ARCHITECTURE),
        (_EQUAL, "", "enosys", architecture),
        (_LOAD, "", "", _NUMBER),
        (_GREATER_EQUAL, "enosys", "", _X32_BIT),
        *((_EQUAL, "enosys", "", number) for number in numbers),
        (_EQUAL, "", "allow", socket),
        (_LOAD, "", "", _FIRST_ARGUMENT),
        *((_EQUAL, "allow", "", family) for family in _ALLOWED_SOCKETS),
        (_RETURN, "", "", _ERRNO | _EAFNOSUPPORT),
        (_RETURN, "", "", _ALLOW),
        (_RETURN, "", "", _ERRNO | _ENOSYS),
    ]
    ends = {"allow": len(lines) - 2, "enosys": len(lines) - 1}

    def jump(line: int, label: str) -> int:
        return ends[label] - line - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", code, jump(line, yes), jump(line, no), value)
        for line, (code, yes, no, value) in enumerate(lines)
    )


def apply(*, nameless_files: bool) -> None:
    """Filter this process and everything it starts from here on. Needs no-new-privileges.

    Args:
        nameless_files: Whether files in memory without a name may be made (memfd): nothing but a control group can
            tell how much memory they hold.
    """
    if code := program(nameless_files=nameless_files):
        k.filter_calls(code)
