"""Encode demonstrations as token sequences with the renderer of the rollouts.

Invariant: a rollout with the same texts has the same tokens. Prompts are rendered and turns are bridged as in
verifiers' train client. If the renderer cannot append a turn, the conversation is rendered again and starts a new
sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from pydantic import TypeAdapter
from renderers import AutoRendererConfig, RendererConfig, create_renderer
from renderers.base import Message, Renderer
from transformers import PreTrainedTokenizerBase

from harbortrainer.environment.renderers_compat import known_format
from harbortrainer.warmup.demonstrations import Demonstration


@dataclass(frozen=True)
class Encoded:
    """One token sequence: `ids` [T], and `answer` [T], true for tokens that the model would sample."""

    ids: list[int]
    answer: list[bool]

    def longest_answer(self) -> int:
        """Return the number of tokens of the longest answer."""
        return max((len(list(run)) for sampled, run in groupby(self.answer) if sampled), default=0)


def renderer_of(tokenizer: PreTrainedTokenizerBase, table: Mapping[str, object] | None = None) -> Renderer:
    """Return the renderer of a run's table `[orchestrator.renderer]`.

    Without a table, reasoning stays in the history, so that turns can be appended.
    """
    if table:
        return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(table))
    known = known_format(tokenizer.name_or_path)
    return create_renderer(tokenizer, AutoRendererConfig(thinking_retention="all" if known else None))


def encode(
    demonstration: Demonstration, renderer: Renderer, tokenizer: PreTrainedTokenizerBase, system: str = ""
) -> list[Encoded]:
    """Return the sequences of one episode: one, unless the renderer cannot append a turn.

    Args:
        demonstration: The episode.
        renderer: The renderer of the rollouts.
        tokenizer: The model's tokenizer.
        system: The agent's system prompt; "" if it has none.
    """
    found: list[Encoded] = []
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    prompt: list[int] = []
    answer_ids: list[int] = []
    for shown, reply in demonstration:
        messages.append({"role": "user", "content": shown})
        bridged = renderer.bridge_to_next_turn(prompt, answer_ids, messages[-1:]) if answer_ids else None
        if bridged is None:
            prompt = renderer.render_ids(messages, add_generation_prompt=True)
            before = Encoded([], [])
        else:
            prompt = bridged.token_ids
            before = found.pop()
        answer_ids = [*tokenizer.encode(reply, add_special_tokens=False), renderer.get_stop_token_ids()[0]]
        messages.append({"role": "assistant", "content": reply})
        answer = before.answer + [False] * (len(prompt) - len(before.ids)) + [True] * len(answer_ids)
        found.append(Encoded(prompt + answer_ids, answer))
    return found
