"""End the sandboxes that a run left behind at Modal: `python modal_cleanup.py RUN` prints their number.

Contract: a Python that has the package `modal` runs this file, so it imports nothing of this project. It is the
`cleanup_script` of the environment type `modal`.
"""

import sys

APP = "__harbor__"
"""Modal app of Harbor's sandboxes, unless environment_kwargs sets another one."""


def end_sandboxes(run: str) -> int:
    """End the sandboxes that have the run's label, and return their number."""
    import modal  # ty: ignore[import-not-found]

    app = modal.App.lookup(APP, create_if_missing=True)
    found = list(modal.Sandbox.list(app_id=app.app_id, tags={"harbortrainer-run": run}))
    for sandbox in found:
        sandbox.terminate()
    return len(found)


if __name__ == "__main__":
    print(end_sandboxes(sys.argv[1]))
