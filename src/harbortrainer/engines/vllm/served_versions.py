"""Which policy versions vLLM holds, which one is asked for, and what is under way on each. State without I/O.

Invariant: a version is asked for only while vLLM holds it, and its files stay while anything may ask for it: the newest
two, and every one that a request is on.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager


class ServedVersions:
    """The versions of one run.

    Args:
        base: The name of the model without an adapter, which is version 0.
    """

    def __init__(self, base: str) -> None:
        self.current = 0
        self._base = base
        self._held = {0}
        self._under_way: Counter[int] = Counter()

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._under_way.total()

    @property
    def held(self) -> set[int]:
        """What may be asked for."""
        return set(self._held)

    def name(self, version: int) -> str:
        """What a request of this version asks for."""
        return f"policy-{version}" if version else self._base

    @contextmanager
    def asked(self, version: int) -> Generator[str]:
        """A request of this version is under way; its model's name.

        Raises:
            KeyError: It is not held any more.
        """
        if version not in self._held:
            raise KeyError(version)
        self._under_way[version] += 1
        try:
            yield self.name(version)
        finally:
            self._under_way[version] -= 1

    def hand_over(self, version: int) -> set[int]:
        """vLLM has the adapter of this version, and new requests are its; the versions that are given up."""
        before, self.current = self.current, version
        self._held.add(version)
        gone = {one for one in self._held - {before, version} if not self._under_way[one]}
        self._held -= gone
        return gone
