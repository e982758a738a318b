"""Thin wrappers of system calls that Python's os module lacks. Each raises OSError with the call in its message."""

import ctypes
import fcntl
import os
import socket
import struct

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_PR_SET_NAME = 15
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_SECUREBITS, _NO_SETUID_FIXUP = 28, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SYSCALLS = {"x86_64": {"pivot_root": 155, "keyctl": 250}, "aarch64": {"pivot_root": 41, "keyctl": 219}}
_FSPICK, _FSCONFIG, _FSPICK_EMPTY_PATH, _SET_STRING, _RECONFIGURE = 433, 431, 8, 1, 7  # on every architecture
_OPENAT2 = 437  # on every architecture
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x02, 0x04, 0x10
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, doing: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")
    return result


def _syscall(name: str, *args) -> int:
    number = _SYSCALLS.get(os.uname().machine, {}).get(name)
    if number is None:
        raise OSError(f"{name}: no call number known for {os.uname().machine}")
    return _check(_libc.syscall(number, *args), name)


def write(path: str, text: str, *, folder: int | None = None, needed: bool = True) -> None:
    """Write to a kernel file.

    Args:
        folder: A descriptor of the folder that `path` is relative to.
        needed: Whether it is an error if the file cannot be opened (older kernels lack it). A refused write always is.
    """
    try:
        fd = os.open(path, os.O_WRONLY, dir_fd=folder)
    except OSError:
        if needed:
            raise
        return
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    """Call mount(2)."""
    encode = lambda text: os.fsencode(text) if text is not None else None  # noqa: E731
    result = _libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data))
    _check(result, f"mount {kind or 'bind'} on {target} ({data})")


def bind(source: str, target: str, *, flags: int = 0) -> None:
    """Bind-mount source on target. Flags such as MS_RDONLY need a second call, which this makes."""
    mount(source, target, None, MS_BIND | MS_REC)
    if flags:
        # Keep the source's restrictions: an unprivileged user may not lift them.
        flags |= os.statvfs(target).f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, None, MS_BIND | MS_REMOUNT | flags)


def reconfigure(folder: int, options: str) -> None:
    """Change the mount options of the filesystem whose root is open as `folder`."""
    picked = _check(_libc.syscall(_FSPICK, folder, b"", _FSPICK_EMPTY_PATH), "fspick")
    try:
        for option in options.split(","):
            name, _, value = option.partition("=")
            set_one = picked, _SET_STRING, name.encode(), value.encode(), 0
            _check(_libc.syscall(_FSCONFIG, *set_one), f"fsconfig {option}")
        _check(_libc.syscall(_FSCONFIG, picked, _RECONFIGURE, None, None, 0), f"fsconfig {options}")
    finally:
        os.close(picked)


def change_root(path: str) -> None:
    """Make `path`, a mount point, the root of this mount namespace and unmount the old root."""
    os.chdir(path)
    pivot_root(".", ".")
    unmount(".")
    os.chdir("/")


def open_in_root(root: int, path: str, flags: int, *, follow: bool = True) -> int:
    """Open a path as if the folder that is open as `root` were the root: links cannot lead outside.

    Without `follow`, a link in the path is an error.
    """
    links = _RESOLVE_NO_MAGICLINKS if follow else _RESOLVE_NO_SYMLINKS
    how = struct.pack("QQQ", flags, 0, links | _RESOLVE_IN_ROOT)
    return _check(_libc.syscall(_OPENAT2, root, os.fsencode(path), how, len(how)), f"open {path}")


def pivot_root(path: str, old: str) -> None:
    """Make `path`, a mount point, the root of this mount namespace and move the old root to `old`."""
    _syscall("pivot_root", os.fsencode(path), os.fsencode(old))


def unmount(path: str) -> None:
    """Unmount the topmost mount at `path`, which may be in use."""
    _check(_libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW), f"unmount {path}")


def die_with_parent() -> None:
    """Have the kernel SIGKILL this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl PDEATHSIG")


def hide_memory() -> None:
    """Prevent other processes from tracing this one or opening its /proc/PID/mem, fd, root and cwd."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl DUMPABLE")


def set_arguments(text: str) -> None:
    """Replace this process's command line, as the process list shows it. It is cut to the length of the old one."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    new = text.encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, new, len(new))


def hide_arguments(name: str) -> None:
    """Blank the command line, which has paths of the host, and set another process name."""
    set_arguments("")
    _check(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "prctl NAME")


def no_new_privileges() -> None:
    """Disable set-uid bits and file capabilities for this process and its children."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")


def set_seccomp_filter(program: bytes) -> None:
    """Install a seccomp filter, a struct sock_filter[], for this process and its children."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "prctl SECCOMP")


def leave_session_keyring() -> None:
    """Leave the session keyring of the parent. Does nothing on a kernel without keyrings."""
    try:
        _syscall("keyctl", _KEYCTL_JOIN_SESSION_KEYRING, None)
    except OSError:
        return


def keep_capabilities_without_root() -> None:
    """Keep this process's capabilities when its user id changes, until it enters another user namespace."""
    _check(_libc.prctl(_PR_SET_SECUREBITS, _NO_SETUID_FIXUP, 0, 0, 0), "prctl SECUREBITS")


def keep_capabilities(keep: frozenset[int]) -> None:
    """Drop all other capabilities, also from the bounding set, so that no exec regains one."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for cap in range(last + 1):
        if cap not in keep:
            _check(_libc.prctl(_PR_CAPBSET_DROP, cap, 0, 0, 0), f"drop capability {cap}")
    bits = sum(1 << cap for cap in keep)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset")


def bring_loopback_up() -> None:
    """Bring `lo` up in this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
