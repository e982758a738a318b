"""ECHO: the prompt tokens of a trace that the model learns to predict, and their weights.

These tokens are the messages of chosen roles after the first answer on their branch. If the renderer reports which
tokens are a message's body, only these count, otherwise the whole message. A message that several branches share is
predicted in the first of them that trains. Source: Prime-RL at commit 559b44772, `EchoAlgorithm._weight_observations`
(src/prime_rl/orchestrator/algo/echo.py) and `_loss_weights` (trajectories.py).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.v1.trace import WireTrace


class Observations:
    """Weights of the predicted tokens of one trace; each token has its weight in one branch only.

    Args:
        trace: A finished trace, whose nodes come after their parents.
        roles: Weight of each role's tokens; empty without ECHO.
    """

    def __init__(self, trace: "WireTrace", roles: Mapping[str, float]) -> None:
        self._nodes, self._roles = trace.nodes, roles
        self._follows_answer: list[bool] = []
        """For each node, whether an answer comes before it."""
        for node in trace.nodes:
            parent = node.parent
            follows = parent is not None and (self._follows_answer[parent] or self._nodes[parent].sampled)
            self._follows_answer.append(follows)
        self._predicted: set[int] = set()

    def weights(self, path: Sequence[int]) -> list[float] | None:
        """Return the weights of one branch's tokens, 0 where an earlier branch has them; None if all are 0.

        Args:
            path: Indices of the branch's nodes in the trace, from the root.
        """
        if not self._roles:
            return None
        out: list[float] = []
        for index in path:
            own = self._node_weights(index)
            out += own
            if any(own):
                self._predicted.add(index)
        return out if any(out) else None

    def _node_weights(self, index: int) -> list[float]:
        node = self._nodes[index]
        weight = self._roles.get(node.message.role, 0.0)
        if not weight or node.sampled or not self._follows_answer[index] or index in self._predicted:
            return [0.0] * len(node.token_ids)
        if len(node.is_content) != len(node.token_ids):
            return [weight] * len(node.token_ids)
        return [weight if body else 0.0 for body in node.is_content]
