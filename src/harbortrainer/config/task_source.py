"""Task sources as one line of text, for the key `dataset` and the command `tasks fetch`.

    datasets/mine                                   a folder
    datasets/mine.parquet                           one or more files (DIR/*.parquet) with rows of `path, task_binary`
    terminal-bench@2.0, ORG/NAME@sha256:...         a dataset of Harbor's registry
    mine/registry.json#NAME@VERSION                 a dataset of another registry, by file or URL
    https://HOST/ORG/REPO@COMMIT#FOLDER             a folder of a git repository (also ssh://, file://, git@HOST:...)
    hf:ORG/NAME@REVISION#data/train-*.parquet       a dataset of the Hugging Face hub, with an optional file pattern

Invariant: a `pinned` source always means the same tasks, on any machine. Parsing reads no file.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from harbortrainer.errors import UserError

type SourceKind = Literal["folder", "parquet", "registry", "git", "hub"]

GIT_SCHEMES = ("https://", "http://", "ssh://", "git://", "file://")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REF = re.compile(r"[\w][\w./+-]*")
DATASET = re.compile(r"(?P<name>[\w][\w.-]*(/[\w][\w.-]*)?)@(?P<at>[\w][\w.:+-]*)")
PARQUET = re.compile(r"(?P<files>.+\.parquet)(@(?P<at>[0-9a-f]{64}))?")
HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
MOVING_VERSIONS = ("head", "latest")
"""Versions of Harbor's registry that change when a newer dataset is published."""
DEFAULT_GIT_FOLDER = "tasks"
"""Folder in which Harbor's clients look for a repository's tasks by default."""


@dataclass(frozen=True)
class TaskSource:
    """A parsed source; `str()` is the inverse of `task_source`."""

    kind: SourceKind
    where: str
    """Folder, parquet file, dataset name or repository URL."""
    at: str = ""
    """Version, commit or revision; empty means the newest."""
    part: str = ""
    """Folder in a git repository or file pattern of a hub dataset; empty means the default."""
    registry: str = ""
    """File or URL of the registry; empty means Harbor's."""

    def __str__(self) -> str:
        start = (f"{self.registry}#" if self.registry else "hf:" if self.kind == "hub" else "") + self.where
        return start + (f"@{self.at}" if self.at else "") + (f"#{self.part}" if self.part else "")

    @property
    def is_local(self) -> bool:
        """Whether the source is on this machine."""
        return self.kind in ("folder", "parquet")

    @property
    def pinned(self) -> bool:
        """Whether the source always means the same tasks; local sources are identified by their content."""
        if self.kind in ("git", "hub"):
            return bool(COMMIT.fullmatch(self.at))
        return self.is_local or self.at not in MOVING_VERSIONS

    def pinned_to(self, at: str) -> "TaskSource":
        """Return this source at a commit or revision."""
        return replace(self, at=at)


def task_source(text: str) -> TaskSource:
    """Parse a source.

    Raises:
        UserError: The text is not a valid source, or contains a password.
    """
    text = text.strip()
    if not text:
        raise UserError("empty task source", do="pass a folder, NAME@VERSION, a git URL or hf:ORG/NAME")
    if text.startswith("hf:"):
        return _hub(text)
    if ".json#" in text:
        return _own_registry(text)
    address = text.removeprefix("git+")
    if address.startswith((*GIT_SCHEMES, "git@")) or address != text:
        return _git(text, address)
    if rows := PARQUET.fullmatch(text):
        return TaskSource("parquet", rows["files"], rows["at"] or "")
    if (found := DATASET.fullmatch(text)) and not Path(text).exists():
        return TaskSource("registry", found["name"], found["at"])
    return TaskSource("folder", text)


def _own_registry(text: str) -> TaskSource:
    registry, _, dataset = text.rpartition("#")
    found = DATASET.fullmatch(dataset)
    if found is None or "/" in found["name"]:
        raise UserError("not a dataset of a registry file", where=text, do="write registry.json#NAME@VERSION")
    return TaskSource("registry", found["name"], found["at"], registry=registry)


def _hub(text: str) -> TaskSource:
    address, _, part = text.removeprefix("hf:").removeprefix("//").removeprefix("datasets/").partition("#")
    name, _, at = address.partition("@")
    if not HUB_NAME.fullmatch(name) or (at and not REF.fullmatch(at)):
        raise UserError("not a hub dataset", where=text, do="write hf:ORG/NAME@REVISION")
    return TaskSource("hub", name, at, part)


def _git(text: str, address: str) -> TaskSource:
    do = "write https://HOST/ORG/REPO@COMMIT#FOLDER"
    if not address.startswith((*GIT_SCHEMES, "git@")):
        raise UserError("not a git URL", where=text, do=do)
    url, _, part = address.partition("#")
    user, _, _ = urlsplit(url).netloc.rpartition("@") if "://" in url else ("", "", "")
    if ":" in user or (user and url.startswith("http")):
        raise UserError("the URL contains a password", do="remove it and use git's credential helper")
    url, at = _split_ref(url)
    if "/tree/" in url and not at:
        url, _, tree = url.partition("/tree/")
        at, _, inner = tree.partition("/")
        part = part or inner or "."
    if at and not REF.fullmatch(at):
        raise UserError(f"{at!r} is not a commit", where=text, do=do)
    if part.startswith("/") or ".." in Path(part).parts:
        raise UserError(f"{part!r} is not a folder in the repository", where=text, do=do)
    return TaskSource("git", url, at, part.strip("/"))


def _split_ref(url: str) -> tuple[str, str]:
    """Split off the ref after an `@` that is not part of `user@host`."""
    start = url.find("/", url.find("://") + 3) if "://" in url else url.find(":")
    before, at, ref = url[start:].rpartition("@")
    return (url[:start] + before, ref) if at and start > 0 else (url, "")
