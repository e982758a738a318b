"""`TrainableTerminus2`: Harbor's Terminus-2 by import path, changed in the few places that training needs.

What the model sees and what its answers do is Harbor's. Different are: how a run ends (at a limit it ends
cleanly, so that the verifier grades what was left; a failure has a name; an answer that cannot be typed is a
malformed one), what is written (the trajectory once, in a thread), and the defaults (reasoning stays in the
history, no summaries, no recording).
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

from harbor.agents.terminus_2.terminus_2 import Command
from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse
from harbor.llms.chat import Chat
from harbor.models.agent.context import AgentContext

from harbortrainer.harbor_side.terminus import AnswerParser, OpenTerminus2
from harbortrainer.sandbox.post_mortem import Crowded
from harbortrainer.sandbox.sandbox_errors import SandboxDiedError
from harbortrainer.trials.chat_client import ChatClient, ClientSettings
from harbortrainer.trials.faults import RolloutEnd, SandboxTimeoutError
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TurnTokens
from harbortrainer.trials.secrets import api_key
from harbortrainer.trials.terminal import SOCKET_ENV, QuickTmux
from harbortrainer.trials.thinking import answer_alone
from harbortrainer.trials.tokens import rollout_details
from harbortrainer.trials.typeable import TypeableParser

_DEFAULTS = {
    "interleaved_thinking": True,
    "enable_summarize": False,
    "record_terminal_session": False,
    "suppress_max_turns_warning": True,
}


class TrainableTerminus2(OpenTerminus2):
    """Terminus-2 for training. Takes Terminus-2's keyword arguments and those below.

    With `api_base` the model is asked by `ChatClient`; without it by Harbor's own LiteLLM backend.

    Args:
        max_cut_answers: Answers in a row that may be cut at their length; the next one ends the run.
        model_retries: Further tries after a model call failed.
        model_timeout_s: Longest wait for one answer.
    """

    def __init__(
        self,
        logs_dir: Path,
        *args: Any,
        max_cut_answers: int = 3,
        model_retries: int = 2,
        model_timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        self._client: ChatClient | None = None
        if kwargs.get("api_base"):
            patience = {"max_cut_answers": max_cut_answers, "retries": model_retries, "timeout_s": model_timeout_s}
            self._client = _client_of(kwargs, **patience)
        self._records_terminal = bool(kwargs.get("record_terminal_session"))
        self._pane = kwargs.get("tmux_pane_width", 160), kwargs.get("tmux_pane_height", 40)
        self._turns_before = 0
        self._begin()
        super().__init__(logs_dir, *args, **_DEFAULTS | kwargs)

    def _begin(self) -> None:
        self._ending: Outcome | None = None
        self._parse_errors = 0
        self._confirmed = False

    @property
    def turn_tokens(self) -> list[TurnTokens]:
        """What was sampled, call by call, over all steps; empty without `collect_rollout_details`."""
        return self._client.turns if self._client is not None else []

    @override
    def make_llm(self) -> BaseLLM | None:
        return self._client

    @override
    def make_parser(self, stock: AnswerParser) -> AnswerParser:
        return TypeableParser(stock)

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        with environment.scoped_exec_env(SOCKET_ENV):
            if self._records_terminal:
                await super().setup(environment)
            else:
                await self.open_terminal(QuickTmux, environment, self._pane).start()

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._begin()
        if self._client is not None:
            self._client.waited_s, self._turns_before = 0.0, len(self._client.turns)
        try:
            with environment.scoped_exec_env(SOCKET_ENV):
                await super().run(instruction, environment, context)
                await self._note_why_it_ended(environment)
        except ContextLengthExceededError:
            self._ending = Outcome.context_limit
        except RolloutEnd as end:
            self._ending = end.ending
        except TimeoutError as error:
            # Harbor would take it for the agent's own timeout, which trains.
            raise SandboxTimeoutError(str(error) or "a command in the sandbox timed out") from error
        finally:
            self._tell(context)
            await asyncio.to_thread(self.write_trajectory)
            if self._client is not None:
                await self._client.aclose()

    async def _note_why_it_ended(self, environment: BaseEnvironment) -> None:
        """The loop returned: the task was declared done, the turns are used up, or the terminal is gone."""
        if self._confirmed:
            return
        if self.turns_used_up:
            self._ending = Outcome.turn_limit
        elif (await environment.exec("true")).return_code != 0 and not await _is_full(environment):
            raise SandboxDiedError("the sandbox does not answer any more")

    def _tell(self, context: AgentContext) -> None:
        """What Harbor keeps of the run: counts, and the token lists (`run_trial` takes those out before they are
        written, as they would make result.json megabytes)."""
        context.metadata = (context.metadata or {}) | {
            "ending": self._ending.value if self._ending else None,
            "parse_errors": self._parse_errors,
        }
        if self._client is not None:
            context.metadata["model_s"] = self._client.waited_s
            context.rollout_details = rollout_details(self._client.turns[self._turns_before :])
        self.note_usage(context)

    @override
    async def ask(self, chat: Chat, prompt: str, instruction: str, session: TmuxSession | None) -> LLMResponse:
        # Stock puts a cut answer back without its reasoning, which would rewrite the history.
        reasoning = self._client.cut_reasoning if self._client is not None else None
        if reasoning and chat.messages and chat.messages[-1]["role"] == "assistant":
            chat.messages[-1]["reasoning_content"] = reasoning
        return answer_alone(await super().ask(chat, prompt, instruction, session))

    @override
    def note_answer(self, *, malformed: bool, confirmed: bool) -> None:
        self._parse_errors += malformed
        self._confirmed = confirmed

    @override
    async def type_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        try:
            if not commands or not isinstance(session, QuickTmux):
                return await super().type_commands(commands, session)
            *first, last = commands
            for command in first:
                await session.type_and_wait(command.keystrokes, command.duration_sec)
            return False, self.shortened(await session.type_and_look(last.keystrokes, last.duration_sec))
        except RuntimeError as error:
            if isinstance(error, SandboxDiedError) or await session.is_session_alive():
                raise
            # The model closed its own terminal: nobody's failure, and what it left is graded.
            raise RolloutEnd(Outcome.completed, "the terminal was closed") from error


async def _is_full(environment: BaseEnvironment) -> bool:
    """Whether there is no room for another command, so that the terminal is gone: grading makes room."""
    return isinstance(environment, Crowded) and bool(await environment.used_up())


def _client_of(kwargs: Mapping[str, Any], **patience: float) -> ChatClient:
    """The client that Terminus-2's own arguments describe."""
    limits = kwargs.get("model_info") or {}
    settings = ClientSettings.model_validate(
        {
            "model": kwargs["model_name"].removeprefix("hosted_vllm/"),
            "base_url": kwargs["api_base"],
            "context_limit": limits.get("max_input_tokens", 32768),
            "output_limit": limits.get("max_output_tokens"),
            "collect_tokens": kwargs.get("collect_rollout_details", False),
            **patience,
        }
    )
    heat = {} if kwargs.get("temperature") is None else {"temperature": kwargs["temperature"]}
    return ChatClient(settings, api_key=api_key(), sampling=(kwargs.get("llm_kwargs") or {}) | heat)
