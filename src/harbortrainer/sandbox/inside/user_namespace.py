"""User namespaces of a sandbox, and their limits of what the kernel counts for each user.

The kernel counts inotify and fanotify objects for the user who makes them and for the owner of each user namespace
around. With one owner, all sandboxes and the host would share the few that the kernel allows a user.

- Root's sandboxes have an owner each: a user id that nothing else on the machine has.
- An ordinary user owns all own sandboxes, so the processes of each get a share of the limit.

Invariant: the agent's processes never use up what the kernel allows the owner, so some is left for the verifier.
"""

import os

from harbortrainer.sandbox.inside import syscalls as k

_FIRST_OWNER = 0xF0000000  # above all ids that systemd, subuid and directory services give; plus a process id
_ALL_USERS = ["0", "0", "4294967295"]
_SHARE_OF_OWN, _SHARE_OF_COMMON = 2, 4
_COUNTED = {  # limit of a user namespace -> the kernel's limit for each user
    "max_inotify_instances": "inotify/max_user_instances",
    "max_inotify_watches": "inotify/max_user_watches",
    "max_fanotify_groups": "fanotify/max_user_groups",
    "max_fanotify_marks": "fanotify/max_user_marks",
}


def unused_owner() -> int | None:
    """Return the id of the user who will own this monitor's sandbox; None if this process may not choose one."""
    with open("/proc/self/uid_map") as file:
        may_choose = os.geteuid() == 0 and file.read().split() == _ALL_USERS
    return _FIRST_OWNER + os.getpid() if may_choose else None


def enter(owner: int | None) -> None:
    """Create and enter a user namespace that `owner` owns; None means this process's user.

    Call `os.seteuid(0)` once the id maps are written.
    """
    if owner is not None:
        k.keep_capabilities_without_root()
        os.seteuid(owner)
    os.unshare(os.CLONE_NEWUSER)


def limit_counters(proc: int, owner: int | None) -> None:
    """Limit what the kernel counts for the users of this user namespace.

    Args:
        proc: A descriptor of a writable /proc.
        owner: The owner of the sandbox, as for `enter`.
    """
    for name, path in _COUNTED.items():
        try:
            fd = os.open(f"sys/fs/{path}", os.O_RDONLY, dir_fd=proc)
        except OSError:
            continue  # older kernels do not count it
        allowed = int(os.read(fd, 32))
        os.close(fd)
        share = _SHARE_OF_COMMON if owner is None else _SHARE_OF_OWN
        k.write(f"sys/user/{name}", str(max(1, allowed // share)), folder=proc, needed=False)
