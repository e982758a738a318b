"""A chat format for models that renderers does not know: the model's own template, to which a turn is appended.

renderers' `default` renders the whole history at each turn, since a template may do anything with it. Many do nothing:
a message has the same text wherever it stands. Where a template is seen to be such a one, what it puts behind an answer
is taken from a short conversation, and follows the tokens that were sampled. In a run file:

    [orchestrator.renderer]
    name = "custom"
    import_path = "harbortrainer.environment.appending_template.AppendingTemplate"

Contract: what is returned begins with the tokens that were given, and goes on with those of the template. Where that is
in doubt (tools, an answer that was cut, anything but one message of a user) the history is rendered anew.
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
    """See the module. Its settings are those of `default`.

    Attributes:
        appends: Whether the template leaves answers as they are, and gives a question the same tokens anywhere.
    """

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer: ChatTemplateTokenizer, config: DefaultRendererConfig | None = None) -> None:
        super().__init__(tokenizer, config)
        asked = [_user(_QUESTIONS[0])]
        self._asked = self._prompt(asked)
        self._opening = len(self._asked) - len(self.render_ids(asked))  # of the next answer
        self.appends = self._same_anywhere()

    @override
    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """See renderers' `Renderer`; None where the history has to be rendered anew."""
        ended = previous_completion_ids[-1:] == self.get_stop_token_ids()
        if not self.appends or tools or not ended or [m.get("role") for m in new_messages] != ["user"]:
            return None
        added = self._behind_an_answer(new_messages[0])
        if added is None:
            return None
        before = [*previous_prompt_ids, *previous_completion_ids]
        owners = [-1] * len(before) + [0] * (len(added) - self._opening) + [-1] * self._opening
        return RenderedTokens(
            token_ids=before + added, message_indices=owners, message_roles=["user"], message_tool_names=[None]
        )

    def _prompt(self, messages: list[Message]) -> list[int]:
        return self.render_ids(messages, add_generation_prompt=True)

    def _behind_an_answer(self, question: Message) -> list[int] | None:
        """The tokens from behind an answer's last one to the beginning of the next; None where that is not found."""
        split = self._split(self._asked, self._prompt([_user(_QUESTIONS[0]), _answer(_ANSWER), question]))
        return None if split is None else split[1]

    def _split(self, before: list[int], whole: list[int]) -> tuple[list[int], list[int]] | None:
        """What an answer and what the question behind it add; None where what was before has changed.

        The token that ends an answer is a special one, so that no word reaches over it.
        """
        added = whole[len(before) :]
        (stop,) = self.get_stop_token_ids() or (None,)
        if whole[: len(before)] != before or stop not in added:
            return None
        end = added.index(stop)
        return added[:end], added[end + 1 :]

    def _same_anywhere(self) -> bool:
        if self._opening < 0:
            return False
        try:
            return self._same_after([]) and self._same_after([{"role": "system", "content": "a system"}])
        except TemplateError:  # some take no system's message
            return self._same_after([])

    def _same_after(self, messages: list[Message]) -> bool:
        """Whether three turns after these messages add what each of them adds alone."""
        messages = [*messages, _user(_QUESTIONS[0])]
        before = self._prompt(messages)
        for answer, question in zip((_THOUGHT, _ANSWER, _THOUGHT), _QUESTIONS, strict=True):
            messages = [*messages, _answer(answer), _user(question)]
            whole = self._prompt(messages)
            split = self._split(before, whole)
            if split is None or self._tokenizer.decode(split[0]) != answer:
                return False
            if split[1] != self._behind_an_answer(_user(question)):
                return False
            before = whole
        return True


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}
