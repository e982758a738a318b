"""Tar archives that write outside the folder to which they are extracted, with Python's filters before 3.12.11."""

import io
import tarfile

DEEP = "d" * 247

type Member = tuple[str, bytes, str]
"""Name, type, and the content of a file or the target of a link."""


def unresolvable_path(outside: str) -> list[Member]:
    """A chain of links whose end has a path that is too long to resolve, so it seems to lead nowhere.

    Args:
        outside: A folder, relative to the one to which the archive is extracted.
    """
    members: list[Member] = []
    folder, steps = "", "abcdefghijklmnop"
    for step in steps:
        members += [(folder + DEEP, tarfile.DIRTYPE, ""), (folder + step, tarfile.SYMTYPE, DEEP)]
        folder += f"{DEEP}/"
    end = "/".join(steps) + "/" + "l" * 254
    return [
        *members,
        (end, tarfile.SYMTYPE, "../" * len(steps)),
        ("escape", tarfile.SYMTYPE, f"{end}/{outside}"),
        ("file", tarfile.LNKTYPE, "escape/file"),
        ("file", tarfile.REGTYPE, "written"),
        ("escape/new", tarfile.REGTYPE, "written"),
    ]


def packed(members: list[Member]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type, content = kind, text.encode() if kind == tarfile.REGTYPE else b""
            member.linkname, member.size = "" if content else text, len(content)
            member.mode = 0o755
            tar.addfile(member, io.BytesIO(content))
    buffer.seek(0)
    return buffer
