"""`TrainableTerminus2`: Harbor's Terminus-2 with the changes that training needs, used by import path.

Prompts and the effect of answers are Harbor's. The differences:

- End of a run. At a limit the agent ends without an error, so the verifier grades the state it left. Failures have
  named exceptions.
- Written files. The trajectory is written once, in a thread.
- Defaults. Reasoning stays in the history; no summaries; no terminal recording.
- Thinking. A server without a reasoning parser returns `<think>a draft</think>the answer` as one text, of which
  Terminus-2 would run the first JSON, the draft. `split_thinking` takes the answer after the thinking, as vLLM's
  parsers do. The history's text and the tokens stay unchanged.
- Malformed answers. Harbor's parsers accept answers that fail later, in the terminal or when written to disk: NUL
  characters, lone surrogates, waits that are no number. They raise on others, such as numbers of thousands of digits.
  Such an answer would end the trial as an error that does not train. `SafeCommandParser` reports it to the model, as
  Terminus-2 reports broken JSON.

Invariant: `SafeCommandParser.parse_response` never raises, and commands that it returns can be typed and serialized.
"""

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, override

from harbor.agents.terminus_2.terminus_2 import Command
from harbor.agents.terminus_2.terminus_json_plain_parser import ParsedCommand, ParseResult
from harbor.agents.terminus_2.tmux_session import TmuxSession
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM, ContextLengthExceededError, LLMResponse
from harbor.llms.chat import Chat
from harbor.models.agent.context import AgentContext

from harbortrainer.harbor_compat import options_with
from harbortrainer.harbor_compat.terminus import AnswerParser, OpenTerminus2
from harbortrainer.sandbox.errors_and_changes import SandboxDiedError
from harbortrainer.sandbox.post_mortem import ReportsExhaustedLimits
from harbortrainer.trials.chat_client import ChatClient, ClientSettings
from harbortrainer.trials.faults import RolloutEnd, SandboxTimeoutError
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.provider_faults import SandboxRequestError
from harbortrainer.trials.record import TurnTokens
from harbortrainer.trials.secrets import api_key
from harbortrainer.trials.tmux_session import SOCKET_ENV, FastTmuxSession
from harbortrainer.trials.tokens import to_rollout_details

OPENING, CLOSING = "<think>", "</think>"


def separate_thinking(response: LLMResponse) -> LLMResponse:
    """Return the response with thinking in its content moved to `reasoning_content`."""
    thinking, answer = split_thinking(response.content)
    if not thinking and answer == response.content:
        return response
    reasoning = [part for part in (response.reasoning_content, thinking) if part]
    return replace(response, content=answer, reasoning_content="\n".join(reasoning) or None)


def split_thinking(content: str) -> tuple[str, str]:
    """Split a text into thinking and answer.

    If the chat template opens the thinking, the text has only the closing tag. Thinking that never closes leaves no
    answer.
    """
    head, closed, tail = content.partition(CLOSING)
    opened = head.lstrip().startswith(OPENING)
    if not closed and not opened:
        return "", content
    return head.lstrip().removeprefix(OPENING).strip(), tail.lstrip()


_SURROGATE = re.compile("[\ud800-\udfff]")
_PARSER_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)


class SafeCommandParser:
    """Harbor's parser, but answers that cannot be typed are malformed. Other attributes are the wrapped parser's."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def __getattr__(self, name: str) -> object:
        return getattr(self._parser, name)

    def parse_response(self, response: str) -> ParseResult:
        """Parse an answer. If one command cannot be typed, the result has an error message and no commands."""
        try:
            result = self._parser.parse_response(response)
        except _PARSER_ERRORS as error:
            reason = " ".join(_clean(error).split())[:200]
            return ParseResult([], False, f"The response cannot be read: {type(error).__name__}: {reason}", "")
        texts = {name: _clean(getattr(result, name)) for name in ("error", "warning", "analysis", "plan")}
        result = replace(result, **texts)
        faults = [fault for i, command in enumerate(result.commands, 1) if (fault := _fault(i, command))]
        return replace(result, commands=[], is_task_complete=False, error="; ".join(faults)) if faults else result


def _clean(text: object) -> str:
    return _SURROGATE.sub("\ufffd", str(text))


def _fault(number: int, command: ParsedCommand) -> str:
    if "\0" in command.keystrokes:
        return f"Command {number} 'keystrokes' contain a NUL character (\\u0000), which cannot be typed"
    if found := _SURROGATE.search(command.keystrokes):
        half = f"\\u{ord(found.group()):04x}"
        return f"Command {number} 'keystrokes' contain half of a surrogate pair ({half}), which cannot be typed"
    if not math.isfinite(command.duration):
        return f"Command {number} 'duration' is not a finite number"
    return ""


_DEFAULTS = {
    "interleaved_thinking": True,
    "enable_summarize": False,
    "record_terminal_session": False,
    "suppress_max_turns_warning": True,
}


class TrainableTerminus2(OpenTerminus2):
    """Terminus-2 for training. Takes Terminus-2's keyword arguments and those below.

    With `api_base`, `ChatClient` calls the model; without it, Harbor's LiteLLM backend does.

    Args:
        max_cut_answers: Allowed consecutive answers cut at their length; one more ends the run.
        model_retries: Retries of a failed model call.
        model_timeout_s: Timeout of one answer, in seconds.
    """

    options_model = options_with(
        OpenTerminus2, max_cut_answers=(int, 3), model_retries=(int, 2), model_timeout_s=(float, 600.0)
    )

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
            limits = {"max_cut_answers": max_cut_answers, "retries": model_retries, "timeout_s": model_timeout_s}
            self._client = make_client(kwargs, **limits)
        self._records_terminal = bool(kwargs.get("record_terminal_session"))
        self._pane = kwargs.get("tmux_pane_width", 160), kwargs.get("tmux_pane_height", 40)
        self._turns_before = 0
        self._reset_run()
        super().__init__(logs_dir, *args, **_DEFAULTS | kwargs)

    def _reset_run(self) -> None:
        self._ending: Outcome | None = None
        self._parse_errors = 0
        self._confirmed = False

    @property
    def turn_tokens(self) -> list[TurnTokens]:
        """Sampled tokens of each call, over all steps; empty without `collect_rollout_details`."""
        return self._client.turns if self._client is not None else []

    @override
    def make_llm(self) -> BaseLLM | None:
        return self._client

    @override
    def make_parser(self, stock: AnswerParser) -> AnswerParser:
        return SafeCommandParser(stock)

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        with environment.scoped_exec_env(SOCKET_ENV):
            if self._records_terminal:
                await super().setup(environment)
            else:
                await self.open_terminal(FastTmuxSession, environment, self._pane).start()

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        self._reset_run()
        if self._client is not None:
            self._client.waited_s, self._turns_before = 0.0, len(self._client.turns)
        try:
            with environment.scoped_exec_env(SOCKET_ENV):
                await super().run(instruction, environment, context)
                await self._record_ending(environment)
        except ContextLengthExceededError:
            self._ending = Outcome.context_limit
        except RolloutEnd as end:
            self._ending = end.ending
        except TimeoutError as error:
            # Harbor would read a TimeoutError as the agent's own timeout, which trains.
            raise SandboxTimeoutError(str(error) or "a command in the sandbox timed out") from error
        finally:
            self._fill_context(context)
            await asyncio.to_thread(self.write_trajectory)
            if self._client is not None:
                await self._client.aclose()

    async def _record_ending(self, environment: BaseEnvironment) -> None:
        """Record why the loop returned: task declared done, turns used up, or terminal gone."""
        if self._confirmed:
            return
        if self.turns_exhausted:
            self._ending = Outcome.turn_limit
        elif (await environment.exec("true")).return_code != 0 and not await _has_exhausted_limits(environment):
            raise SandboxDiedError("the sandbox no longer responds")

    def _fill_context(self, context: AgentContext) -> None:
        """Fill the context that Harbor keeps of the run: counts and token lists.

        `run_trial` removes the token lists before Harbor writes result.json, since they are megabytes.
        """
        context.metadata = (context.metadata or {}) | {
            "ending": self._ending.value if self._ending else None,
            "parse_errors": self._parse_errors,
        }
        if self._client is not None:
            context.metadata["model_s"] = self._client.waited_s
            context.rollout_details = to_rollout_details(self._client.turns[self._turns_before :])
        self.record_usage(context)

    @override
    async def query_model(self, chat: Chat, prompt: str, instruction: str, session: TmuxSession | None) -> LLMResponse:
        # Harbor re-adds a cut answer without its reasoning, which would rewrite the history.
        reasoning = self._client.cut_reasoning if self._client is not None else None
        if reasoning and chat.messages and chat.messages[-1]["role"] == "assistant":
            chat.messages[-1]["reasoning_content"] = reasoning
        return separate_thinking(await super().query_model(chat, prompt, instruction, session))

    @override
    def on_answer(self, *, malformed: bool, confirmed: bool) -> None:
        self._parse_errors += malformed
        self._confirmed = confirmed

    @override
    async def type_commands(self, commands: list[Command], session: TmuxSession) -> tuple[bool, str]:
        try:
            if not commands or not isinstance(session, FastTmuxSession):
                return await super().type_commands(commands, session)
            *first, last = commands
            for command in first:
                await session.type_and_wait(command.keystrokes, command.duration_sec)
            return False, self.limit_output(await session.type_and_capture(last.keystrokes, last.duration_sec))
        except RuntimeError as error:
            if isinstance(error, SandboxDiedError | SandboxRequestError) or await session.is_session_alive():
                raise
            # The model closed its own terminal. This is no failure; the state it left is graded.
            raise RolloutEnd(Outcome.completed, "the terminal was closed") from error


async def _has_exhausted_limits(environment: BaseEnvironment) -> bool:
    """Whether the sandbox's limits leave no room for another command; grading raises these limits."""
    return isinstance(environment, ReportsExhaustedLimits) and bool(await environment.exhausted_limit())


def make_client(kwargs: Mapping[str, Any], **limits: float) -> ChatClient:
    """Make the client that Terminus-2's arguments describe."""
    model_info = kwargs.get("model_info") or {}
    settings = ClientSettings.model_validate(
        {
            "model": kwargs["model_name"].removeprefix("hosted_vllm/"),
            "base_url": kwargs["api_base"],
            "context_limit": model_info.get("max_input_tokens", 32768),
            "output_limit": model_info.get("max_output_tokens"),
            "collect_tokens": kwargs.get("collect_rollout_details", False),
            **limits,
        }
    )
    temperature = {} if kwargs.get("temperature") is None else {"temperature": kwargs["temperature"]}
    return ChatClient(settings, api_key=api_key(), sampling=(kwargs.get("llm_kwargs") or {}) | temperature)
