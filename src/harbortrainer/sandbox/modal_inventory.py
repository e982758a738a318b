"""Inventory of sandboxes at Modal: `python modal_inventory.py find [RUN]` and `python modal_inventory.py end ID...`.

Contract: a Python that has the package `modal` runs this file, so it imports nothing of this project. It is the
`inventory` of the environment type `modal`.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

APP = "__harbor__"
"""Modal app of Harbor's sandboxes, unless environment_kwargs sets another one."""
REQUESTS = 16
"""Parallel requests."""


def find(run: str) -> list[dict[str, str]]:
    """Return the sandboxes of a run. An empty `run` means all runs."""
    import modal  # ty: ignore[import-not-found]

    app = modal.App.lookup(APP, create_if_missing=True)
    wanted = {"harbortrainer-run": run} if run else {"harbor.managed": "true"}
    sandboxes = list(modal.Sandbox.list(app_id=app.app_id, tags=wanted))
    with ThreadPoolExecutor(REQUESTS) as pool:
        tags = pool.map(lambda sandbox: sandbox.get_tags(), sandboxes)
    return [
        {
            "id": sandbox.object_id,
            "run": own["harbortrainer-run"],
            "owner": own.get("harbortrainer-owner", ""),
            "since": own.get("harbortrainer-since", ""),
            "task": own.get("harbor.environment_name", ""),
        }
        for sandbox, own in zip(sandboxes, tags, strict=True)
        if "harbortrainer-run" in own
    ]


def end(ids: Sequence[str]) -> None:
    """End these sandboxes. Raises the first error when all have been tried: one may have ended by itself."""
    import modal  # ty: ignore[import-not-found]

    with ThreadPoolExecutor(REQUESTS) as pool:
        ends = [pool.submit(lambda number: modal.Sandbox.from_id(number).terminate(), number) for number in ids]
    for ended in ends:
        ended.result()


if __name__ == "__main__":
    if sys.argv[1] == "find":
        print(json.dumps(find("".join(sys.argv[2:]))))
    else:
        end(sys.argv[2:])
