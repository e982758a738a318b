"""ECHO: which tokens of a trace the model learns to predict, and with what weight.

These are the tokens that it was given, not those that it sampled: the messages of chosen roles that come after its
first answer on their branch. Of a message only the body counts, where the renderer says which of its tokens are that;
without its word all of the message's tokens do. A message that several branches share is predicted in the first of
them that trains. Source: Prime-RL at commit 559b44772, `EchoAlgorithm._weight_observations`
(src/prime_rl/orchestrator/algo/echo.py) and `_loss_weights` (trajectories.py).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace


class Observations:
    """Hands out each token of one trace once.

    Args:
        trace: A finished trace; a node comes after its parent.
        roles: The weight of each role's tokens; none at all without ECHO.
    """

    def __init__(self, trace: "WireTrace", roles: Mapping[str, float]) -> None:
        self._nodes, self._roles = trace.nodes, roles
        self._told: list[bool] = []
        """Of each node: whether an answer comes before it."""
        for node in trace.nodes:
            above = node.parent
            self._told.append(above is not None and (self._told[above] or self._nodes[above].sampled))
        self._predicted: set[int] = set()

    def weights(self, path: Sequence[int]) -> list[float] | None:
        """The weights of one branch's tokens, 0 where they were handed out before; None where all are.

        Args:
            path: The branch's nodes, from the root, as indices into the trace.
        """
        if not self._roles:
            return None
        out: list[float] = []
        for index in path:
            own = self._of(index)
            out += own
            if any(own):
                self._predicted.add(index)
        return out if any(out) else None

    def _of(self, index: int) -> list[float]:
        node = self._nodes[index]
        weight = self._roles.get(node.message.role, 0.0)
        if not weight or node.sampled or not self._told[index] or index in self._predicted:
            return [0.0] * len(node.token_ids)
        if len(node.is_content) != len(node.token_ids):
            return [weight] * len(node.token_ids)
        return [weight if body else 0.0 for body in node.is_content]
