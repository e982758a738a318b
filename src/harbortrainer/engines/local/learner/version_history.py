"""Weights of the last policy versions, for recomputing log-probabilities."""

from harbortrainer.engines.local.learner.trained_policy import PolicyWeights


class VersionHistory:
    """Weights of the last policy versions, on the CPU; never empty.

    The version that was evicted last and version 0 are kept too, for comparisons.

    Args:
        keep: Maximum number of versions; the oldest is evicted first.
        base: Weights of version 0.
    """

    def __init__(self, keep: int, base: PolicyWeights) -> None:
        self._keep, self.base = max(1, keep), base
        self._versions = {0: base}
        self._evicted: dict[int, PolicyWeights] = {}

    @property
    def versions(self) -> list[int]:
        """Kept versions, oldest first."""
        return list(self._versions)

    @property
    def newest(self) -> int:
        """Current version."""
        return self.versions[-1]

    def __getitem__(self, version: int) -> PolicyWeights:
        return self._versions[version]

    def add(self, weights: PolicyWeights) -> None:
        """Add the next version, and evict the oldest if there are too many."""
        self._versions[self.newest + 1] = weights
        if len(self._versions) > self._keep:
            oldest = self.versions[0]
            self._evicted = {oldest: self._versions.pop(oldest)}

    def restart(self, version: int, weights: PolicyWeights) -> None:
        """Keep this version only."""
        self._versions, self._evicted = {version: weights}, {}

    def find(self, version: int) -> PolicyWeights | None:
        """Return the weights of a version that is kept or was evicted last; None for others."""
        return (self._versions | self._evicted).get(version)
