"""Terminus-2 that reports its turns to a listener, for `harbortrainer rollout`."""

from typing import override

from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.llms.base import LLMResponse
from harbor.llms.chat import Chat

from harbortrainer.trials.agent import TrainableTerminus2
from harbortrainer.trials.turn_listener import TURN_LISTENER


class LiveTerminus2(TrainableTerminus2):
    """`TrainableTerminus2` that also reports each prompt and answer to the `TURN_LISTENER`."""

    @override
    async def query_model(self, chat: Chat, prompt: str, instruction: str, session: TmuxSession | None) -> LLMResponse:
        listener = TURN_LISTENER.get()
        if listener is not None:
            listener.on_prompt(prompt)
        response = await super().query_model(chat, prompt, instruction, session)
        if listener is not None:
            listener.on_answer(response.reasoning_content, response.content)
        return response
