"""The last step of a model: from hidden states at chosen positions to their logits, and to no others.

Most models do no more there than one matrix. Some do more behind it (a cap as Gemma's, a scale as Granite's): of those
the model's own forward pass is asked, with the decoder left out of it.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

_PROBE = 8
"""Tokens, by which it is seen what a model's last step is."""
_MARK = 64.0
"""Logits that are given out for the matrix's, from -64 to 64: whatever is done to logits shows in them."""


class OutputHead:
    """Hidden states, and the logits that a model makes of them.

    Args:
        base: In evaluation mode, on `device`.
    """

    def __init__(self, base: PreTrainedModel, device: torch.device) -> None:
        self._base: nn.Module = base
        self._decoder: nn.Module = base.get_decoder()
        self.vocab = base.config.get_text_config().vocab_size
        self._logits = None if self._decoder is base else self._last_step(base.get_output_embeddings(), device)

    def states(self, **row: object) -> Tensor:
        """[T, D] the last hidden states of a row; [T, V] logits when the model's last step is not to be had alone."""
        if self._logits is None:
            return self._base(**row, use_cache=False).logits[0]
        return self._decoder(**row, use_cache=False).last_hidden_state[0]

    def logits(self, states: Tensor) -> Tensor:
        """[n, V] of some rows of what `states` gave."""
        return states if self._logits is None else self._logits(states)

    @torch.no_grad()
    def _last_step(self, matrix: nn.Module | None, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """The cheapest way that gives what the whole model gives, None when there is none."""
        probe = torch.arange(_PROBE, device=device)[None] % self.vocab
        states = self._decoder(input_ids=probe, use_cache=False).last_hidden_state
        if matrix is not None and self._is_all(matrix, probe, states):
            return matrix
        whole, parts = self._base(input_ids=probe, use_cache=False).logits[0], self._behind_decoder(states[0])
        return self._behind_decoder if _same(whole, parts) else None

    def _is_all(self, matrix: nn.Module, probe: Tensor, states: Tensor) -> bool:
        """Whether the model gives its last hidden states to this matrix, and gives out what that says as it is."""
        given: list[Tensor] = []
        marks: list[Tensor] = []

        def mark(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            given.append(args[0])
            line = torch.linspace(-_MARK, _MARK, logits.numel(), dtype=logits.dtype, device=logits.device)
            marks.append(line.view_as(logits))
            return marks[-1]

        hook = matrix.register_forward_hook(mark)
        try:
            whole = self._base(input_ids=probe, use_cache=False).logits
        finally:
            hook.remove()
        return len(marks) == 1 and _same(given[0], states) and torch.equal(whole.float(), marks[0].float())

    def _behind_decoder(self, states: Tensor) -> Tensor:
        with _says(self._decoder, states[None]):
            unread = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
            return self._base(input_ids=unread, use_cache=False).logits[0]


@contextmanager
def _says(decoder: nn.Module, states: Tensor) -> Generator[None]:
    """Let a decoder compute nothing, and give these states. For one thread at a time."""
    own = vars(decoder).get("forward")  # as accelerate's hooks leave one
    decoder.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=states)
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4, rtol=1e-3)
