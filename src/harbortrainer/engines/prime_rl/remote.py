"""Sandboxes of a run at a provider: ended by their label where the provider has labels.

Harbor ends a sandbox when its trial ends; this is for trials whose process was killed. It runs in a process of its
own, with the Python that has the provider's package. Invariant: only sandboxes with this run's label are ended.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harbortrainer.engines.programs import output_of

TIMEOUT_S = 120
APP = "__harbor__"
"""The Modal app that Harbor's sandboxes belong to, unless environment_kwargs says otherwise."""

MODAL = """
import sys, modal
app = modal.App.lookup(sys.argv[2], create_if_missing=True)
found = list(modal.Sandbox.list(app_id=app.app_id, tags={"harbortrainer-run": sys.argv[1]}))
for sandbox in found:
    sandbox.terminate()
print(len(found))
"""
HAVE_LABELS = {"modal": MODAL}


def end_remote(run: str, kinds: Sequence[str], python: Path, *, app: str = APP) -> list[str]:
    """End what a run left at providers.

    Args:
        run: The run's identity.
        kinds: Environment types that ran elsewhere.
        python: An interpreter that may have the providers' packages.
        app: The Modal app.

    Returns:
        What to tell the user, a line each; nothing where nothing was left.
    """
    return [line for kind in kinds if (line := _end(run, kind, python, app))]


def _end(run: str, kind: str, python: Path, app: str) -> str:
    if kind not in HAVE_LABELS:
        return f"sandboxes at {kind} whose trial was killed end with the provider's own timeout"
    for interpreter in (str(python), sys.executable):
        said = output_of(interpreter, "-c", HAVE_LABELS[kind], run, app, timeout_s=TIMEOUT_S)
        if said is not None:
            count = said.strip().splitlines()[-1]
            return "" if count == "0" else f"cleaned up: {count} sandboxes at {kind}"
    return f"sandboxes at {kind} could not be looked for; those whose trial was killed end with their timeout"
