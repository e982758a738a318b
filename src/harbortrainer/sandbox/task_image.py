"""The image of a sandbox: where its files are, and its environment, working folder, user and entrypoint.

- `lowers`: the layers of an image from a builder.
- `layer`: the files that a Dockerfile's steps added to a root filesystem. If it is small, each sandbox gets a copy;
  else it is mounted below the sandbox.
- An ordinary user's image has both: its large layers, and a merged copy of the small layers on top of them.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

FILE = "image.json"
SMALL_ENTRIES, SMALL_BYTES = 300, 4 << 20
"""Size that a sandbox copies in a few milliseconds."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Healthcheck:
    """The check that a sandbox is ready."""

    argv: list[str]
    timeout_s: float
    """Time limit of one attempt, in seconds."""
    within_s: float
    """Time limit for the sandbox to become ready, in seconds after its start."""


@dataclass
class Image:
    """Settings and layers of an image, saved beside its layer."""

    env: dict[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    workdir: str = "/"
    folders: list[str] = field(default_factory=list)
    """Folders of WORKDIR instructions that the builder did not create, in order."""
    user: str | None = None
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: Healthcheck | None = None
    lowers: list[str] = field(default_factory=list)
    """Folders of layers, topmost first."""
    layer: str | None = None
    small: bool = False
    builder: str = ""
    """The program that also keeps the image, under a name of this project."""
    name: str = ""
    """Display name: the Dockerfile's task, or the image reference."""

    def save(self, folder: Path) -> None:
        """Save the image's settings into its folder."""
        (folder / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load an image from its folder; `layer` follows the folder if it was moved."""
        fields = json.loads((folder / FILE).read_text())
        check = fields.pop("healthcheck", None)
        layer = str(folder / "upper") if (folder / "upper").is_dir() else None
        return cls(**fields | {"layer": layer, "healthcheck": check and Healthcheck(**check)})
