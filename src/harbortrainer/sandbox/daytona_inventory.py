"""Inventory of sandboxes at Daytona: the counterpart of `modal_inventory`, with the same contract."""

import json
import sys
from collections.abc import Sequence


def find(run: str) -> list[dict[str, str]]:
    """Return the sandboxes of a run. An empty `run` means all runs."""
    from daytona import Daytona, ListSandboxesQuery  # ty: ignore[import-not-found]

    wanted = {"harbortrainer-run": run} if run else {"harbor.managed": "true"}
    return [
        {
            "id": sandbox.id,
            "run": sandbox.labels["harbortrainer-run"],
            "owner": sandbox.labels.get("harbortrainer-owner", ""),
            "since": sandbox.labels.get("harbortrainer-since", ""),
            "task": sandbox.labels.get("harbor.environment_name", ""),
        }
        for sandbox in Daytona().list(ListSandboxesQuery(labels=wanted))
        if "harbortrainer-run" in sandbox.labels
    ]


def end(ids: Sequence[str]) -> None:
    """End these sandboxes. Raises the first error when all have been tried: one may have ended by itself."""
    from daytona import Daytona  # ty: ignore[import-not-found]

    client, errors = Daytona(), []
    for number in ids:
        try:
            client.delete(client.get(number))
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]


if __name__ == "__main__":
    if sys.argv[1] == "find":
        print(json.dumps(find("".join(sys.argv[2:]))))
    else:
        end(sys.argv[2:])
