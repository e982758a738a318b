"""What a Dockerfile leaves behind besides files: environment, folder, user, shell.

`layer` is the folder of its files; a small one is copied into each sandbox, a large one is mounted below it.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

_FILE = "image.json"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Image:
    """The state that instructions change, kept beside the layer they filled."""

    env: dict[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    workdir: str = "/"
    user: str | None = None
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    layer: str | None = None
    small: bool = False

    def save(self, folder: Path) -> None:
        """Write beside the layer."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote; `layer` is where the folder is now."""
        return cls(**json.loads((folder / _FILE).read_text()) | {"layer": str(folder / "upper")})
