"""The adapters of the last policy versions, on the CPU, for the proof and for whoever samples from them."""

from harbortrainer.engines.local.learner.policy import Adapter


class History:
    """At most `keep` versions; the oldest goes first. Never empty."""

    def __init__(self, keep: int, adapter: Adapter) -> None:
        self._keep = max(1, keep)
        self._adapters: dict[int, Adapter] = {0: adapter}

    @property
    def versions(self) -> list[int]:
        """The kept versions, oldest first."""
        return list(self._adapters)

    @property
    def newest(self) -> int:
        """The current version."""
        return self.versions[-1]

    def __getitem__(self, version: int) -> Adapter:
        return self._adapters[version]

    def add(self, adapter: Adapter) -> None:
        """Take in the next version and forget the oldest when there are too many."""
        self._adapters[self.newest + 1] = adapter
        if len(self._adapters) > self._keep:
            del self._adapters[self.versions[0]]

    def restart(self, version: int, adapter: Adapter) -> None:
        """Keep this version alone."""
        self._adapters = {version: adapter}
