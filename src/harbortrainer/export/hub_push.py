"""Upload of an export to the Hugging Face hub, and the public description of its base model.

Contract: a new repository is private unless the user requests a public one, and nothing is uploaded to a public one
without that request. After an error the export's folder remains. The same commit removes older weights, since loaders
would combine an adapter and a whole model in one repository.

A base model on the hub is described by its id and commit. A local folder is never named; the fingerprints of its files
describe it. A folder of the hub's cache counts as the model on the hub.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from harbortrainer.errors import UserError
from harbortrainer.runs.provenance import first_change, model_fingerprints

REPO = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)")
MAX_NAME = 96
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json", "generation_config.json")


@dataclass(frozen=True)
class HubRepo:
    """A model repository on the hub."""

    name: str
    """Name of the repository: ORG/NAME."""
    public: bool = False
    """Whether a public repository is requested."""

    def check(self) -> None:
        """Raise `UserError` for an invalid name or without a token; no request is sent."""
        if not REPO.fullmatch(self.name) or len(self.name) > MAX_NAME or "--" in self.name or ".." in self.name:
            raise UserError(f"{self.name!r} is not a valid repository name", where="--push", do="write ORG/NAME")
        from huggingface_hub import get_token

        if not get_token():
            raise UserError("no token for the hub", where="--push", do="run `hf auth login`, or set HF_TOKEN")

    def push(self, folder: Path) -> str:
        """Upload a folder and return the URL of the repository.

        Raises:
            UserError: The hub cannot be reached or rejects the upload; the message has the next step.
        """
        import httpx
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        hub = HfApi()
        try:
            hub.create_repo(self.name, private=not self.public, exist_ok=True)
            if not self.public and not hub.model_info(self.name).private:
                do = f"add --public, or choose another name; the export is in {folder}"
                raise UserError(f"{self.name} already exists and is public", where="--push", do=do)
            message = f"Add {folder.name}"
            hub.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns=list(WEIGHTS)
            )
        except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
            private = "" if self.public else " --private"
            upload = f"hf upload{private} {self.name} {shlex.quote(str(folder))}"
            do = f"the export is in {folder}; try again with `{upload}`"
            there = "cannot be reached" if isinstance(error, httpx.TransportError) else f"rejected {self.name}"
            raise UserError(f"{hub.endpoint} {there}: {_reason(error)}", where="--push", do=do) from error
        return f"{hub.endpoint}/{self.name}"


def _reason(error: Exception) -> str:
    """Return the first line of an error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SNAPSHOT = re.compile(r"(?:.*/)?models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
COMMIT = "commit"


@dataclass(frozen=True)
class BaseModelOrigin:
    """Origin of a base model."""

    loads_from: str
    """Folder or hub id to load the model from on this machine."""
    hub_id: str | None
    """Name on the hub; None for a local folder."""
    commit: str | None
    """Commit on the hub that was trained on, if it is known."""
    files: Mapping[str, str]
    """Fingerprints of the files at the start of the run (`runs/provenance.py`); empty for a model on the hub."""

    @classmethod
    def of(cls, named: str, weights: Mapping[str, str]) -> Self:
        """Return the origin of the base `named` in a run; `weights` are the fingerprints that the run recorded."""
        if cached := SNAPSHOT.fullmatch(named):
            return cls(named, f"{cached[1]}/{cached[2]}", cached[3], {})
        files = {name: digest for name, digest in weights.items() if name != COMMIT}
        if files or Path(named).is_dir() or not HUB_ID.fullmatch(named):
            return cls(named, None, None, files or model_fingerprints(named))
        return cls(named, named, weights.get(COMMIT), {})

    def check(self) -> None:
        """Raise `UserError` if a local folder no longer exists or has changed since the training."""
        if self.hub_id is not None:
            return
        do = "restore the folder"
        if not Path(self.loads_from).is_dir():
            raise UserError("the model that the run started from no longer exists", where=self.loads_from, do=do)
        if change := first_change(self.files, model_fingerprints(self.loads_from)):
            what = f"differs from the model that the run started from: {change}"
            raise UserError(what, where=self.loads_from, do=do)

    def license(self) -> str | None:
        """Return the license that the base's own card names, an identifier of the hub; None if it is unknown.

        The card lies in the base's folder, or on the hub, which gets one request.
        """
        named = _license_of_folder(Path(self.loads_from))
        if named is None and self.hub_id is not None:
            named = _license_on_hub(self.hub_id, self.commit)
        return named if isinstance(named, str) and LICENSE.fullmatch(named) else None


LICENSE = re.compile(r"\w[\w.+-]*")
HUB_S = 10.0
"""Longest wait for the hub's answer in seconds."""


def _license_of_folder(folder: Path) -> object:
    import yaml
    from huggingface_hub import ModelCard

    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        return ModelCard(text, ignore_metadata_errors=True).data.get("license")
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _license_on_hub(name: str, commit: str | None) -> object:
    import httpx
    from huggingface_hub import HfApi

    try:
        card = HfApi().model_info(name, revision=commit, timeout=HUB_S).card_data
    except (httpx.HTTPError, OSError, ValueError):
        return None
    return card.get("license") if card else None
