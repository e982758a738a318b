"""Where a page's links lead: to the server's addresses, or within the one file of an export."""

from collections.abc import Collection
from urllib.parse import quote


class ServerLinks:
    """Addresses of the local server."""

    live = True
    """Whether there is somebody who answers: filters, pages, refreshing."""

    def overview(self) -> str:
        """The first page."""
        return "/"

    def tasks(self, query: str = "") -> str:
        """The heat map."""
        return f"/tasks?{query}" if query else "/tasks"

    def trials(self, query: str = "") -> str:
        """A list of trials."""
        return f"/trials?{query}" if query else "/trials"

    def trial(self, name: str) -> str:
        """One trial."""
        return f"/trial/{quote(name, safe='')}"

    def group(self, name: str) -> str:
        """One group."""
        return f"/group/{quote(name, safe='')}"


class FileLinks(ServerLinks):
    """Anchors within one file; empty for what is not in it.

    Args:
        trials: Names of the trials that are in it in full.
        groups: Ids of the groups that are.
    """

    live = False

    def __init__(self, trials: Collection[str], groups: Collection[str]) -> None:
        self._trials = {name: f"#trial-{index}" for index, name in enumerate(trials, 1)}
        self._groups = {name: f"#group-{index}" for index, name in enumerate(groups, 1)}

    def overview(self) -> str:
        """The first page."""
        return "#overview"

    def tasks(self, query: str = "") -> str:
        """The heat map as it was written."""
        return "" if query else "#tasks"

    def trials(self, query: str = "") -> str:
        """The list as it was written."""
        return "" if query else "#trials"

    def trial(self, name: str) -> str:
        """One trial, if it is here."""
        return self._trials.get(name, "")

    def group(self, name: str) -> str:
        """One group, if it is here."""
        return self._groups.get(name, "")
