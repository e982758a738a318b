"""The label of a run: an environment variable of its processes, and a label of its containers.

Invariant: two runs on one machine have different labels, even with the same name.
"""

import hashlib
from pathlib import Path

RUN_VARIABLE = "HARBORTRAINER_RUN"
RUN_LABEL = "harbortrainer.run"
TRIALS_DIR_VARIABLE = "HARBORTRAINER_TRIALS_DIR"
"""Environment variable with the folder of the run's trials."""


def run_label(folder: Path) -> str:
    """Return the label of the run in a folder: its name and a hash of its absolute path.

    Example:
        >>> run_label(Path("/outputs/quickstart"))
        'quickstart-a34d422e'
    """
    path = folder.absolute()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
