"""The verifier's own root: the system folders as the sandbox started with them, other files as the agent left them.

Only for `verifier_tools = "image"`. The image's root is mounted a second time, with its own upper folder, before the
agent starts. The verifier's root is a tmpfs that shows the system folders of that second root, and everything else of
the agent's root. An agent can add files and folders to `/`, so these are shown anew whenever grading begins.

Invariants:
- No process of the agent has a name for a mount point of the verifier's root. A mount point that another mount
  namespace can remove would uncover what lies below it.
- What the verifier writes to a system folder is not visible to the agent, and stays for the next step's verifier.
"""

import contextlib
import os
import shutil
import stat

from harbortrainer.sandbox.inside import syscalls as k

SYSTEM = frozenset(
    (
        *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu"),
        *("/var/cache", *(f"/var/lib/{name}" for name in ("apt", "dnf", "dpkg", "pacman", "rpm"))),
        *(f"/root/.{name}" for name in ("local", "cache", "config", "pip", "cargo", "nvm", "pyenv", "rustup")),
        *(f"/root/.{name}" for name in ("bashrc", "bash_profile", "bash_login", "profile", "zshrc", "zshenv")),
        *(f"/root/.{name}" for name in ("gitconfig", "curlrc", "wgetrc", "netrc", "npmrc", "pydistutils.cfg")),
        *("/conftest.py", "/pytest.ini", "/.pytest.ini", "/pyproject.toml", "/tox.ini", "/setup.cfg", "/setup.py"),
    )
)
"""Paths that the verifier sees as the sandbox started with them."""
_PARTLY = frozenset(parent for path in SYSTEM for parent in (f"/{path.split('/')[1]}", os.path.dirname(path))) - SYSTEM
"""Folders with entries of both kinds, which are shown entry by entry."""
_SHARED = ("/proc", "/dev", "/logs", "/tests")
_COVERED = "/sys"
"""In each root an empty folder. In the sandbox's root it holds the image's root and the verifier's until grading can
begin; in the verifier's, the agent's. It is covered before any command runs."""
_IMAGE, _VERIFIER = f"{_COVERED}/root", f"{_COVERED}/verifier"
MAX_ENTRIES = 2000
"""Entries of one folder that are shown, each by a mount. The agent could delay grading with more."""


def enter() -> int:
    """Make the verifier's root, without the agent's files, the root of this mount namespace.

    Returns:
        A descriptor of the agent's root.
    """
    os.mkdir(_VERIFIER)
    k.bind(_VERIFIER, _VERIFIER)
    for path in sorted(SYSTEM):
        _show_system_path(path)
    for path in _SHARED:
        os.mkdir(_VERIFIER + path)
        k.bind(path, _VERIFIER + path)
    os.mkdir(_VERIFIER + _COVERED)
    k.pivot_root(_VERIFIER, _VERIFIER + _COVERED)
    os.chdir("/")
    agent_root = os.open(_COVERED, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    k.mount("tmpfs", _COVERED, "tmpfs", k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC, "size=4k,mode=755")
    return agent_root


def _show_system_path(path: str) -> None:
    """Show a path of the image's root in the verifier's; links and files are copied, as a mounted one is immutable."""
    folder = ""
    for part in path.split("/")[1:-1]:
        folder += f"/{part}"
        if not _is_folder(_IMAGE + folder):
            return
        if not os.path.isdir(_VERIFIER + folder):
            os.mkdir(_VERIFIER + folder)
            _copy_access(os.stat(_IMAGE + folder), _VERIFIER + folder)
    source, target = _IMAGE + path, _VERIFIER + path
    if not os.path.lexists(source):
        return
    if _is_folder(source):
        os.mkdir(target)
        k.bind(source, target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def cover_in_agent_namespace() -> None:
    """Remove the image's root and the verifier's from the agent's mount namespace."""
    k.unmount(_COVERED)


def show_agent_files(mount_namespace: int, agent_root: int, work_dir: str) -> bool:
    """Show the agent's present files in the verifier's root. Files that an earlier call showed are removed first.

    Call it in a process of its own with the rights to mount: it enters the sandbox's mount namespace.

    Args:
        mount_namespace: A descriptor of the grader's mount namespace.
        agent_root: The descriptor that `enter` returned.
        work_dir: The agent's working folder, which is shown even below a system folder.

    Returns:
        Whether all are shown: of a folder that is shown entry by entry, at most `MAX_ENTRIES` are.

    Raises:
        OSError: A file could not be mounted; the verifier would not see it.
    """
    # Mount sources are named by descriptor, relative to this folder: /proc of the sandbox does not have this process.
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.setns(mount_namespace, os.CLONE_NEWNS)
    os.fchdir(descriptors)
    _remove_shown("")
    _show_work_dir(os.path.normpath(work_dir), agent_root)
    image = os.open(_IMAGE.removeprefix("/"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=agent_root)
    return _show_folder("", agent_root, image)


def _show_work_dir(path: str, agent_root: int) -> None:
    """Show the agent's working folder if it is below a system folder and the agent left it a folder."""
    if not any(path.startswith(f"{system}/") for system in SYSTEM):
        return
    os.makedirs(path, exist_ok=True)
    if os.stat(path).st_dev != os.stat(os.path.dirname(path)).st_dev:  # shown by an earlier call
        k.unmount(path)
    fd = os.dup(agent_root)
    try:
        for part in path.split("/")[1:]:
            parent, fd = fd, os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(parent)
        k.bind(str(fd), path)
    except (FileNotFoundError, NotADirectoryError):
        return
    finally:
        os.close(fd)


def _remove_shown(folder: str) -> None:
    """Remove everything from a folder of the verifier's root that is not a system path."""
    own = os.stat("/").st_dev
    for name in os.listdir(folder or "/"):
        path = f"{folder}/{name}"
        if path in _PARTLY and _is_folder(path):
            _remove_shown(path)
        elif path not in SYSTEM and path not in (*_SHARED, _COVERED):
            if os.lstat(path).st_dev != own:  # the agent's file, which must not be removed itself
                k.unmount(path)
            if os.lstat(path).st_dev != own:
                raise OSError(f"{path} is still mounted")
            if _is_folder(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def _show_folder(folder: str, agent: int, image: int) -> bool:
    """Show the entries of a folder of the agent's root, which is open as `agent`. Return whether all are shown.

    Those that the image's root has too come first, since they are the most likely to be graded.
    """
    names = sorted(os.listdir(agent), key=lambda name: not _exists(f"{folder}/{name}".lstrip("/"), image))
    complete = len(names) <= MAX_ENTRIES
    for name in names[:MAX_ENTRIES]:
        path = f"{folder}/{name}"
        if path in SYSTEM or path in (*_SHARED, _COVERED):
            continue
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=agent)
        except FileNotFoundError:  # removed meanwhile
            continue
        try:
            complete &= _show_entry(path, fd, image)
        finally:
            os.close(fd)
    return complete


def _show_entry(path: str, fd: int, image: int) -> bool:
    info = os.fstat(fd)
    if path in _PARTLY and stat.S_ISDIR(info.st_mode):
        os.makedirs(path, exist_ok=True)
        _copy_access(info, path)
        inner = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            return _show_folder(path, inner, image)
        finally:
            os.close(inner)
    if path in _PARTLY and os.path.isdir(path):
        return True  # replaced by the agent; the verifier keeps the image's part
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink("", dir_fd=fd), path)
    else:
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        k.bind(str(fd), path)
    return True


def _exists(path: str, folder: int) -> bool:
    try:
        os.lstat(path, dir_fd=folder)
    except OSError:
        return False
    return True


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _copy_access(info: os.stat_result, target: str) -> None:
    with contextlib.suppress(OSError):  # an ordinary user's sandbox has only one user
        os.chown(target, info.st_uid, info.st_gid)
    os.chmod(target, stat.S_IMODE(info.st_mode))
