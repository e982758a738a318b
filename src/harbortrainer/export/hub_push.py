"""Putting an export on the Hugging Face hub with the user's token.

Contract: a repository that is made is private unless the user says otherwise, and nothing goes into a public one
unasked; whatever goes wrong, the folder stays. Its weights there are those of the export alone: older ones are removed
in the same commit, since adapter and whole model side by side would be read as one.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from harbortrainer.errors import UserError

REPO = re.compile(r"(\w[\w.-]*)/(\w[\w.-]*)")
LONGEST = 96
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json", "generation_config.json")


@dataclass(frozen=True)
class HubRepo:
    """A model's repository on the hub."""

    name: str
    """ORG/NAME."""
    public: bool = False
    """Whether everybody may see it."""

    def check(self) -> None:
        """Raises `UserError` for a name that cannot be, or when there is no token; the hub is not asked."""
        if not REPO.fullmatch(self.name) or len(self.name) > LONGEST or "--" in self.name or ".." in self.name:
            raise UserError(f"{self.name!r} is no name of a repository", where="--push", do="write ORG/NAME")
        from huggingface_hub import get_token

        if not get_token():
            raise UserError("no token of the hub", where="--push", do="run `hf auth login`, or set HF_TOKEN")

    def push(self, folder: Path) -> str:
        """Upload a folder; returns the address of what is there now.

        Raises:
            UserError: The hub cannot be reached or refuses; says how to go on.
        """
        import httpx
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        hub = HfApi()
        try:
            hub.create_repo(self.name, private=not self.public, exist_ok=True)
            if not self.public and not hub.model_info(self.name).private:
                do = f"add --public, or name another; the export is in {folder}"
                raise UserError(f"{self.name} is there and public", where="--push", do=do)
            message = f"Add {folder.name}"
            hub.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns=list(WEIGHTS)
            )
        except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
            private = "" if self.public else " --private"
            do = f"the export is in {folder}; try again with `hf upload{private} {self.name} {folder}`"
            there = "cannot be reached" if isinstance(error, httpx.TransportError) else f"did not take {self.name}"
            raise UserError(f"{hub.endpoint} {there}: {_reason(error)}", where="--push", do=do) from error
        return f"{hub.endpoint}/{self.name}"


def _reason(error: Exception) -> str:
    """Why, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
