"""`TrainableTerminus2`: Harbor's Terminus-2 by import path, changed in the few places that training needs.

What the model sees and what its answers do is Harbor's. Different are: how a run ends (at a limit it ends
cleanly, so that the verifier grades what was left; a failure has a name), what is written (the trajectory once,
in a thread), and the defaults (reasoning stays in the history, no summaries, no recording).
"""

import asyncio
from pathlib import Path
from typing import Any, override

from harbor.agents.terminus_2.terminus_2 import Command, Terminus2
from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse
from harbor.llms.chat import Chat
from harbor.models.agent.context import AgentContext
from harbor.models.trial.paths import EnvironmentPaths

from harbortrainer.sandbox.errors import SandboxDiedError
from harbortrainer.trials import trajectory
from harbortrainer.trials.faults import RolloutEnd, SandboxTimeoutError
from harbortrainer.trials.llm import ChatClient, ClientSettings
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TurnTokens
from harbortrainer.trials.secrets import api_key
from harbortrainer.trials.terminal import SOCKET_ENV, QuickTmux
from harbortrainer.trials.tokens import rollout_details

_DEFAULTS: dict[str, Any] = {
    "interleaved_thinking": True,
    "enable_summarize": False,
    "record_terminal_session": False,
    "suppress_max_turns_warning": True,
}

# Stock's, without its three blind tries: the client has retried what is worth it.
_ask_once = Terminus2._query_llm.__wrapped__  # type: ignore[attr-defined]


class TrainableTerminus2(Terminus2):
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
        self._patience = {
            "max_cut_answers": max_cut_answers,
            "retries": model_retries,
            "timeout_s": model_timeout_s,
        }
        self._records_terminal = bool(kwargs.get("record_terminal_session"))
        self._pane = kwargs.get("tmux_pane_width", 160), kwargs.get("tmux_pane_height", 40)
        self._ending: Outcome | None = None
        self._parse_errors = 0
        self._confirmed = False
        self._turns_before = 0
        super().__init__(logs_dir, *args, **_DEFAULTS | kwargs)

    @property
    def turn_tokens(self) -> list[TurnTokens]:
        """What was sampled, call by call, over all steps; empty without `collect_rollout_details`."""
        return self._llm.turns if isinstance(self._llm, ChatClient) else []

    @override
    def _init_llm(self, *args: Any, **kwargs: Any) -> BaseLLM:
        if not kwargs.get("api_base"):
            return super()._init_llm(*args, **kwargs)
        info = kwargs.get("model_info") or {}
        settings = ClientSettings(
            model=kwargs["model_name"].removeprefix("hosted_vllm/"),
            base_url=kwargs["api_base"],
            context_limit=info.get("max_input_tokens", 32768),
            output_limit=info.get("max_output_tokens"),
            collect_tokens=kwargs["collect_rollout_details"],
            **self._patience,
        )
        sampling = dict(kwargs.get("llm_kwargs") or {})
        if kwargs.get("temperature") is not None:
            sampling["temperature"] = kwargs["temperature"]
        return ChatClient(settings, api_key=api_key(), sampling=sampling)

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        with environment.scoped_exec_env(SOCKET_ENV):
            if self._records_terminal:
                return await super().setup(environment)
            width, height = self._pane
            self._session = QuickTmux(
                session_name=self.name(),
                environment=environment,
                logging_path=EnvironmentPaths.agent_dir / "terminus_2.pane",
                local_asciinema_recording_path=None,
                remote_asciinema_recording_path=None,
                pane_width=width,
                pane_height=height,
                extra_env=self._extra_env,
                user=environment.default_user,
            )
            await self._session.start()

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._ending, self._parse_errors, self._confirmed = None, 0, False
        if isinstance(self._llm, ChatClient):
            self._llm.waited_s, self._turns_before = 0.0, len(self._llm.turns)
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
            await asyncio.to_thread(trajectory.write, self)
            if isinstance(self._llm, ChatClient):
                await self._llm.aclose()

    async def _note_why_it_ended(self, environment: BaseEnvironment) -> None:
        """The loop returned: the task was declared done, the turns are used up, or the terminal is gone."""
        if self._confirmed:
            return
        if self._n_episodes >= self._max_episodes:
            self._ending = Outcome.turn_limit
        elif (await environment.exec("true")).return_code != 0:
            raise SandboxDiedError("the sandbox does not answer any more")

    def _tell(self, context: AgentContext) -> None:
        """What Harbor keeps of the run: counts, and the token lists (`run_trial` takes those out before they are
        written, as they would make result.json megabytes)."""
        context.metadata = (context.metadata or {}) | {
            "ending": self._ending.value if self._ending else None,
            "parse_errors": self._parse_errors,
        }
        if isinstance(self._llm, ChatClient):
            context.metadata["model_s"] = self._llm.waited_s
            context.rollout_details = rollout_details(self._llm.turns[self._turns_before :])
        trajectory.note_usage(context, self._model_name)

    @override
    async def _query_llm(  # ty: ignore[incompatible-attribute-override] - stock wraps its own in retries
        self,
        chat: Chat,
        prompt: str,
        original_instruction: str = "",
        session: TmuxSession | None = None,
    ) -> LLMResponse:
        self._keep_reasoning_of_a_cut_answer(chat)
        answer = await _ask_once(self, chat, prompt, original_instruction, session)
        if isinstance(answer, str):  # a cut answer of which the XML parser saved a part
            chat.messages.append({"role": "user", "content": prompt})
            chat.messages.append({"role": "assistant", "content": answer})
            return LLMResponse(content=answer)
        return answer

    def _keep_reasoning_of_a_cut_answer(self, chat: Chat) -> None:
        """Stock puts a cut answer back without its reasoning, which would rewrite the history."""
        reasoning = self._llm.cut_reasoning if isinstance(self._llm, ChatClient) else None
        if reasoning and chat.messages and chat.messages[-1]["role"] == "assistant":
            chat.messages[-1]["reasoning_content"] = reasoning

    @override
    async def _handle_llm_interaction(
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> tuple[list[Command], bool, str, str, str, LLMResponse]:
        was_pending = self._pending_completion
        answer = await super()._handle_llm_interaction(chat, prompt, original_instruction, session)
        _, is_task_complete, feedback, *_ = answer
        malformed = "ERROR:" in feedback
        self._parse_errors += malformed
        self._confirmed = is_task_complete and was_pending and not malformed
        return answer

    @override
    async def _execute_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        try:
            if not commands or not isinstance(session, QuickTmux):
                return await super()._execute_commands(commands, session)
            *first, last = commands
            for command in first:
                await session.send_keys(command.keystrokes, min_timeout_sec=command.duration_sec)
            return False, self._limit_output_length(await session.type_and_look(last.keystrokes, last.duration_sec))
        except RuntimeError as error:
            if isinstance(error, SandboxDiedError) or await session.is_session_alive():
                raise
            # The model closed its own terminal: nobody's failure, and what it left is graded.
            raise RolloutEnd(Outcome.completed, "the terminal was closed") from error

    @override
    def _dump_trajectory(self) -> None:
        """Not every turn: that is quadratic and stalls the event loop. `run` writes it once."""
