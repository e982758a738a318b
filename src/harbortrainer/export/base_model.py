"""The model that a run started from, as somebody on another machine can be told of it.

A hub id stays one, with its commit. A folder of this machine is never named: by what it is called here nobody finds
it, so it is told by the fingerprints of its files. A folder of the hub's own cache is what lies on the hub.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harbortrainer.errors import UserError
from harbortrainer.runs.ingredients import first_change, weights_of

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SNAPSHOT = re.compile(r"(?:.*/)?models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
COMMIT = "commit"


@dataclass(frozen=True)
class BaseModelOrigin:
    """Where a base model is found."""

    here: str
    """What loads it on this machine: a folder or a hub id."""
    hub_id: str | None
    """Its name on the hub; None for a folder."""
    commit: str | None
    """The commit on the hub that was trained on, where it is known."""
    files: Mapping[str, str]
    """Fingerprints of its files when the run started (`runs/ingredients.py`); empty for one on the hub."""

    @classmethod
    def of(cls, named: str, weights: Mapping[str, str]) -> Self:
        """The base that the run called `named`; `weights`: what it wrote down about its files."""
        if cached := SNAPSHOT.fullmatch(named):
            return cls(named, f"{cached[1]}/{cached[2]}", cached[3], {})
        files = {name: digest for name, digest in weights.items() if name != COMMIT}
        if files or Path(named).is_dir() or not HUB_ID.fullmatch(named):
            return cls(named, None, None, files or weights_of(named))
        return cls(named, named, weights.get(COMMIT), {})

    def need(self) -> None:
        """Raises `UserError` when it is a folder that is gone, or holds another model than was trained on."""
        if self.hub_id is not None:
            return
        do = "put it back as it was"
        if not Path(self.here).is_dir():
            raise UserError("the model that the run started from is not there any more", where=self.here, do=do)
        if change := first_change(self.files, weights_of(self.here)):
            what = f"is another model than the run started from: {change}"
            raise UserError(what, where=self.here, do=do)
