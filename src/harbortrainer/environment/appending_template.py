"""A renderer for models that renderers does not know: the model's own template, extended turn by turn.

renderers' `default` renders the whole history at each turn, since a template may change any part of it. Most templates
render a message the same way at any position. For such a template, the tokens between two answers are rendered in a
short conversation and appended to the sampled tokens. In a run file:

    [orchestrator.renderer]
    name = "custom"
    import_path = "harbortrainer.environment.appending_template.AppendingTemplate"

Contract: the returned tokens are the given tokens followed by the template's. If that is uncertain (tools, an answer
cut at its length, anything but one user message), the whole history is rendered again.
"""

from typing import override

from jinja2 import TemplateError
from renderers import DefaultRendererConfig
from renderers.base import ChatTemplateTokenizer, Message, RenderedTokens, ToolSpec
from renderers.default import DefaultRenderer

_ANSWER = "an answer"
_THOUGHT = f"<think>\na thought\n</think>\n\n{_ANSWER}"
_QUESTIONS = ("a question", "another\n\nquestion ", "a question")


class AppendingTemplate(DefaultRenderer):
    """Renderer that appends turns of the model's own template. Takes the settings of `default`.

    Attributes:
        appends: Whether the template keeps answers unchanged and renders a question the same at any position.
    """

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer: ChatTemplateTokenizer, config: DefaultRendererConfig | None = None) -> None:
        super().__init__(tokenizer, config)
        question = [_user(_QUESTIONS[0])]
        self._question_ids = self._prompt(question)
        self._header_length = len(self._question_ids) - len(self.render_ids(question))  # of the next answer's header
        self.appends = self._is_position_independent()

    @override
    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """Return the next prompt, or None if the whole history must be rendered again; see renderers' `Renderer`."""
        ended = previous_completion_ids[-1:] == self.get_stop_token_ids()
        if not self.appends or tools or not ended or [m.get("role") for m in new_messages] != ["user"]:
            return None
        added = self._tokens_after_answer(new_messages[0])
        if added is None:
            return None
        before = [*previous_prompt_ids, *previous_completion_ids]
        owners = [-1] * len(before) + [0] * (len(added) - self._header_length) + [-1] * self._header_length
        return RenderedTokens(
            token_ids=before + added, message_indices=owners, message_roles=["user"], message_tool_names=[None]
        )

    def _prompt(self, messages: list[Message]) -> list[int]:
        return self.render_ids(messages, add_generation_prompt=True)

    def _tokens_after_answer(self, question: Message) -> list[int] | None:
        """Return the tokens between the end of an answer and the start of the next one; None if they are not found."""
        split = self._split(self._question_ids, self._prompt([_user(_QUESTIONS[0]), _answer(_ANSWER), question]))
        return None if split is None else split[1]

    def _split(self, before: list[int], whole: list[int]) -> tuple[list[int], list[int]] | None:
        """Split the added tokens into an answer and the question after it; None if earlier tokens have changed.

        An answer ends with a special token, so no token spans the boundary.
        """
        added = whole[len(before) :]
        (stop,) = self.get_stop_token_ids() or (None,)
        if whole[: len(before)] != before or stop not in added:
            return None
        end = added.index(stop)
        return added[:end], added[end + 1 :]

    def _is_position_independent(self) -> bool:
        if self._header_length < 0:
            return False
        try:
            return self._same_after([]) and self._same_after([{"role": "system", "content": "a system"}])
        except TemplateError:  # some templates reject a system message
            return self._same_after([])

    def _same_after(self, messages: list[Message]) -> bool:
        """Whether each of three turns after these messages adds the same tokens as it does alone."""
        messages = [*messages, _user(_QUESTIONS[0])]
        before = self._prompt(messages)
        for answer, question in zip((_THOUGHT, _ANSWER, _THOUGHT), _QUESTIONS, strict=True):
            messages = [*messages, _answer(answer), _user(question)]
            whole = self._prompt(messages)
            split = self._split(before, whole)
            if split is None or self._tokenizer.decode(split[0]) != answer:
                return False
            if split[1] != self._tokens_after_answer(_user(question)):
                return False
            before = whole
        return True


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
