"""The output head of a model: logits at chosen positions only, from their hidden states.

In most models the head is one matrix. Some also cap (Gemma) or scale (Granite) its result. For these the model's own
forward pass is called with a stub as its decoder.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

_PROBE_TOKENS = 8
"""Tokens of the forward pass that determines a model's head."""
_MARKER = 64.0
"""The probe replaces the matrix's logits by values from -64 to 64, so any change to logits is visible in the result."""


class OutputHead:
    """Hidden states of a model, and the logits of its head.

    Args:
        base: The model, in evaluation mode, on `device`.
        device: Device of the model.
    """

    def __init__(self, base: PreTrainedModel, device: torch.device) -> None:
        self._base: nn.Module = base
        self._decoder: nn.Module = base.get_decoder()
        self.vocab = base.config.get_text_config().vocab_size
        self._logits = None if self._decoder is base else self._find_head(base.get_output_embeddings(), device)

    def states(self, **row: object) -> Tensor:
        """Return the last hidden states [T, D] of a row; logits [T, V] if the head cannot be called alone."""
        if self._logits is None:
            return self._base(**row, use_cache=False).logits[0]
        return self._decoder(**row, use_cache=False).last_hidden_state[0]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, V] of some rows of the result of `states`."""
        return states if self._logits is None else self._logits(states)

    @torch.no_grad()
    def _find_head(self, matrix: nn.Module | None, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """Return the cheapest function with the same result as the whole model; None if there is none."""
        probe = torch.arange(_PROBE_TOKENS, device=device)[None] % self.vocab
        states = self._decoder(input_ids=probe, use_cache=False).last_hidden_state
        if matrix is not None and self._is_whole_head(matrix, probe, states):
            return matrix
        whole, parts = self._base(input_ids=probe, use_cache=False).logits[0], self._call_without_decoder(states[0])
        return self._call_without_decoder if _same(whole, parts) else None

    def _is_whole_head(self, matrix: nn.Module, probe: Tensor, states: Tensor) -> bool:
        """Whether this matrix gets the last hidden states, and its result is the model's result unchanged."""
        given: list[Tensor] = []
        marks: list[Tensor] = []

        def mark(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            given.append(args[0])
            line = torch.linspace(-_MARKER, _MARKER, logits.numel(), dtype=logits.dtype, device=logits.device)
            marks.append(line.view_as(logits))
            return marks[-1]

        hook = matrix.register_forward_hook(mark)
        try:
            whole = self._base(input_ids=probe, use_cache=False).logits
        finally:
            hook.remove()
        return len(marks) == 1 and _same(given[0], states) and torch.equal(whole.float(), marks[0].float())

    def _call_without_decoder(self, states: Tensor) -> Tensor:
        with _fixed_states(self._decoder, states[None]):
            placeholder = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
            return self._base(input_ids=placeholder, use_cache=False).logits[0]


@contextmanager
def _fixed_states(decoder: nn.Module, states: Tensor) -> Generator[None]:
    """Make a decoder return these states without computing. Not thread-safe."""
    own = vars(decoder).get("forward")  # accelerate's hooks set one
    decoder.forward = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=states)
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-4, rtol=1e-3)
