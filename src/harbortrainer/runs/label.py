"""The name that everything a run starts carries: its processes in their environment, its containers as a label.

Invariant: two runs on one machine never share it, also when they share their name.
"""

import hashlib
from pathlib import Path

RUN_VARIABLE = "HARBORTRAINER_RUN"
RUN_LABEL = "harbortrainer.run"
TRIALS_DIR_VARIABLE = "HARBORTRAINER_TRIALS_DIR"
"""Says where a run's trials go, to every process of it."""


def run_label(folder: Path) -> str:
    """The label of the run in a folder: its name and a hash of the whole path.

    Example:
        >>> run_label(Path("/outputs/quickstart"))
        'quickstart-a34d422e'
    """
    path = folder.absolute()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
