"""Terminus-2 that tells what happens while it happens, for one trial that somebody watches."""

from typing import override

from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.llms.base import LLMResponse
from harbor.llms.chat import Chat

from harbortrainer.trials.agent import TrainableTerminus2
from harbortrainer.trials.narrator import NARRATOR


class NarratedTerminus2(TrainableTerminus2):
    """Takes the same arguments, and does the same."""

    @override
    async def ask(self, chat: Chat, prompt: str, instruction: str, session: TmuxSession | None) -> LLMResponse:
        narrator = NARRATOR.get()
        if narrator is not None:
            narrator.shown(prompt)
        response = await super().ask(chat, prompt, instruction, session)
        if narrator is not None:
            narrator.said(response.reasoning_content, response.content)
        return response
