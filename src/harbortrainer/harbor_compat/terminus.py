"""Terminus-2 and its terminal, with public names for the private API that training uses.

The loop, the prompts and the parsers remain Harbor's. Two private behaviours change here: a model call is made once and
not three times, and the trajectory is not written every turn.
"""

import json
import secrets
from typing import Any, Protocol, override

from harbor.agents.terminus_2.terminus_2 import Command, Terminus2
from harbor.agents.terminus_2.terminus_json_plain_parser import ParseResult
from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.llms.chat import Chat
from harbor.models.agent import context as harbor_context
from harbor.models.agent.context import AgentContext
from harbor.models.trajectories import Agent, FinalMetrics, Trajectory
from harbor.models.trial.paths import EnvironmentPaths

from harbortrainer.harbor_compat import TERMINUS

TERMINUS.check()

_query_once = Terminus2._query_llm.__wrapped__  # type: ignore[attr-defined]


class AnswerParser(Protocol):
    """Terminus-2's JSON or XML parser."""

    def parse_response(self, response: str) -> ParseResult:
        """Return the commands of an answer, or its errors."""
        ...


class OpenTmux(TmuxSession):
    """Harbor's tmux session with access to the commands that it runs."""

    @property
    def name(self) -> str:
        """Name of the tmux session."""
        return self._session_name

    @property
    def start_command(self) -> str:
        """The command that starts the session."""
        return self._tmux_start_session

    def typing_command(self, keys: str) -> str | None:
        """Return the command that types `keys`; None if they are too long and must be pasted."""
        return None if self._key_requires_paste(keys) else self._send_keys_command([keys])

    async def run_inside(self, command: str) -> ExecResult:
        """Run a command as the session's user."""
        return await self.environment.exec(command=command, user=self._user)

    async def new_output(self, buffer: str, screen: str) -> str:
        """Return the model's view: what is new in `buffer` since the last call, else the visible `screen`."""
        first = self._previous_buffer is None
        new = None if first else await self._find_new_content(buffer)
        self._previous_buffer = buffer
        return f"New Terminal Output:\n{new}" if new and new.strip() else f"Current Terminal Screen:\n{screen}"


class OpenTerminus2(Terminus2):
    """Harbor's Terminus-2 with public hooks such as `make_llm`, `make_parser`, `query_model` and `on_answer`."""

    @property
    def turns_exhausted(self) -> bool:
        """Whether the last run used all of its turns."""
        return self._n_episodes >= self._max_episodes

    def make_llm(self) -> BaseLLM | None:
        """Return the model client; None for Harbor's own. Called by `__init__`."""
        return None

    async def query_model(self, chat: Chat, prompt: str, instruction: str, session: TmuxSession | None) -> LLMResponse:
        """Request one answer, without retries, and add it to the chat. Harbor requests a truncated answer again."""
        answer: LLMResponse | str = await _query_once(self, chat, prompt, instruction, session)
        if isinstance(answer, LLMResponse):
            return answer
        # The answer was truncated, and the XML parser recovered a part of it.
        chat.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return LLMResponse(content=answer)

    def make_parser(self, stock: AnswerParser) -> AnswerParser:
        """Return the answer parser, given Harbor's own. Called by `__init__`."""
        return stock

    def on_answer(self, *, malformed: bool, confirmed: bool) -> None:
        """Handle a new answer; does nothing here.

        Args:
            malformed: Whether it could not be parsed.
            confirmed: Whether it confirms that the task is complete, which ends the run.
        """

    async def type_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        """Type the model's commands; return whether that timed out, and the output for the model."""
        return await super()._execute_commands(commands, session)

    def limit_output(self, output: str) -> str:
        """Cut the middle out of a long output for the model."""
        return self._limit_output_length(output)

    def open_terminal(self, kind: type[TmuxSession], sandbox: BaseEnvironment, size: tuple[int, int]) -> TmuxSession:
        """Create the agent's session, neither started nor recorded; `size` is in columns and lines."""
        self._session = kind(
            session_name=self.name(),
            environment=sandbox,
            logging_path=EnvironmentPaths.agent_dir / "terminus_2.pane",
            local_asciinema_recording_path=None,
            remote_asciinema_recording_path=None,
            pane_width=size[0],
            pane_height=size[1],
            extra_env=self._extra_env,
            user=sandbox.default_user,
        )
        return self._session

    def write_trajectory(self) -> None:
        """Write `trajectory.json` (ATIF) into the agent's folder, unless the agent never started. Blocks.

        Harbor's writer runs a regular expression over the whole text, which blocks the interpreter for seconds if it
        contains token ids. This one writes none; the client keeps them.
        """
        context = self._context
        if context is None or not self._trajectory_steps:
            return
        trajectory = Trajectory(
            session_id=self._session_id,
            agent=Agent(name=self.name(), version=self.version() or "unknown", model_name=self._model_name),
            steps=self._trajectory_steps,
            final_metrics=FinalMetrics(
                total_prompt_tokens=context.n_input_tokens,
                total_completion_tokens=context.n_output_tokens,
                total_cached_tokens=context.n_cache_tokens or 0,
                total_cost_usd=context.cost_usd or None,
            ),
        )
        text = json.dumps(trajectory.to_json_dict(), ensure_ascii=False)
        # The folder may be mounted: what the agent put in the file's place is replaced and never opened.
        draft = self.logs_dir / f".trajectory-{secrets.token_hex(8)}"
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.logs_dir / "trajectory.json")
        except OSError as error:
            self.logger.warning("could not write trajectory.json: %s", error)
            draft.unlink(missing_ok=True)

    def record_usage(self, context: AgentContext) -> None:
        """Record which model used the tokens; otherwise Harbor 0.24 reads the trajectory again."""
        if not hasattr(harbor_context, "ModelUsage"):  # before 0.24
            return
        usage = harbor_context.ModelUsage(
            n_input_tokens=context.n_input_tokens or 0,
            n_cache_tokens=context.n_cache_tokens or 0,
            n_output_tokens=context.n_output_tokens or 0,
            cost_usd=context.cost_usd,
        )
        setattr(context, "model_usage", {self._model_name: usage})  # noqa: B010 - a field since 0.24

    @override
    def _init_llm(self, *args: Any, **wanted: Any) -> BaseLLM:
        return self.make_llm() or super()._init_llm(*args, **wanted)

    @override
    def _get_parser(self) -> AnswerParser:
        return self.make_parser(super()._get_parser())

    @override
    async def _query_llm(  # ty: ignore[incompatible-attribute-override] - stock wraps its own in retries
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> LLMResponse:
        return await self.query_model(chat, prompt, original_instruction, session)

    @override
    async def _handle_llm_interaction(
        self, chat: Chat, prompt: str, original_instruction: str = "", session: TmuxSession | None = None
    ) -> tuple[list[Command], bool, str, str, str, LLMResponse]:
        was_pending = self._pending_completion
        answer = await super()._handle_llm_interaction(chat, prompt, original_instruction, session)
        _, is_task_complete, feedback, *_ = answer
        malformed = "ERROR:" in feedback
        self.on_answer(malformed=malformed, confirmed=is_task_complete and was_pending and not malformed)
        return answer

    @override
    async def _execute_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        return await self.type_commands(commands, session)

    @override
    def _dump_trajectory(self) -> None:
        """Do nothing: writing every turn takes quadratic time and blocks the event loop."""
