"""Changed files of a container, read from outside from its layer, as in a local sandbox.

`docker diff` is no substitute: it compares sizes and modification times, which the agent can restore, and reads the
whole image each time.

Invariant: nothing inside the container runs for it, and no link of the container is followed.
"""

import asyncio
import os
from pathlib import Path

from harbortrainer.sandbox.errors_and_changes import SandboxChanges
from harbortrainer.sandbox.inside.messages import SandboxSpec
from harbortrainer.sandbox.inside.overlay_diff import UpperLayer


def can_read_layers(driver: str) -> bool:
    """Whether this process can read the layers of a daemon on this machine with this storage driver."""
    return driver == "overlay2" and os.geteuid() == 0


class ContainerChanges:
    """The changes of one container since its creation here.

    Args:
        details: The daemon's description of the container.
        folder: A folder of this machine for a temporary file.
        upper: Folder with the container's changes.
    """

    def __init__(self, details: dict, folder: Path, upper: str) -> None:
        self._upper = upper
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lowers = details["GraphDriver"]["Data"]["LowerDir"].split(":")
        variables = dict(variable.partition("=")[::2] for variable in details["Config"]["Env"] or [])
        mounts = {mount["Destination"]: mount["Source"] for mount in details["Mounts"] if mount["Type"] == "volume"}
        mounts |= {"/etc/hosts": details.get("HostsPath", ""), "/etc/resolv.conf": details.get("ResolvConfPath", "")}
        spec = SandboxSpec(lowers=lowers, search_path=variables.get("PATH", ""))
        self._layer = UpperLayer(spec, None, self._folder, root=upper, mounts=mounts)
        self._layer.mark()

    @classmethod
    def start(cls, details: dict, folder: Path) -> "ContainerChanges | None":
        """Count changes from now on; None if the container's layer cannot be read from here."""
        driver = details.get("GraphDriver") or {}
        upper = (driver.get("Data") or {}).get("UpperDir", "")
        if not can_read_layers(driver.get("Name", "")) or not Path(upper).is_dir():
            return None
        return cls(details, folder, upper)

    async def read(self) -> SandboxChanges | None:
        """Return the changes; None if the container was removed."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> SandboxChanges | None:
        try:
            return SandboxChanges.from_message(self._layer.changes()) if Path(self._upper).is_dir() else None
        except OSError:
            return None  # removed meanwhile

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)
