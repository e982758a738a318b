"""A Harbor feature as a small task, with the model's input and the sandboxes that refuse it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

type Place = Literal["host", "image", "docker", "harbor", "image tools"]
PLACES: tuple[Place, ...] = ("host", "image", "docker", "harbor")
"""The recorded places. `image tools`, the host's root with another setting, must give the same as `host`."""

DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\n"
SOLVED = "test -f /app/answer && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row of the table in docs/harbor.md.

    The values of these fields are part of a feature's hash, except `refused`, `differs` and `needs`.
    """

    name: str
    toml: str = ""
    """Lines of task.toml, tables included."""
    dockerfile: str = DOCKERFILE
    """environment/Dockerfile; none when empty."""
    test: str = SOLVED
    """Body of tests/test.sh; none when empty."""
    types: str = "touch answer"
    """Lines that the model types in the first turn of each step."""
    types_s: float = 1.0
    """Wait in seconds after each line."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """Body of each step's test.sh by the step's name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the task; those named .sh are executable."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Symbolic links of the task: target by path."""
    prompted: str = ""
    """Text that the model's first message must contain."""
    host_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of this machine."""
    timeout_multiplier: float = 1.0
    thinks_s: float = 0.0
    """Delay in seconds of the model's first answer."""
    refused: Mapping[Place, str] = field(default_factory=dict)
    """Text of the refusal before the run, by place."""
    differs: Mapping[Place, str] = field(default_factory=dict)
    """Difference from Harbor's own trial, by place, as text for the table."""
    needs: str = ""
    """Tool that Harbor's containers need for it: `buildx`, or none."""

    def write(self, folder: Path) -> Path:
        """Write the task into a folder and return the folder."""
        own = {"task.toml": self._toml()}
        if self.dockerfile:
            own["environment/Dockerfile"] = self.dockerfile
        if self.steps:
            for name, test in self.steps.items():
                own |= {f"steps/{name}/instruction.md": f"Step {name}.", f"steps/{name}/tests/test.sh": test}
        else:
            own["instruction.md"] = "Create the file /app/answer."
            own |= {"tests/test.sh": self.test} if self.test else {}
        for name, text in (own | dict(self.files)).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/bash\n{text}\n" if name.endswith(".sh") else text)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        for name, target in self.links.items():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)
        (folder / "environment").mkdir(exist_ok=True)
        return folder

    def _toml(self) -> str:
        steps = "".join(f'[[steps]]\nname = "{name}"\n' for name in self.steps if f'name = "{name}"' not in self.toml)
        return f"{self.toml}\n{steps}"
