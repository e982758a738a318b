"""`PlainAgent`: an agent for small models, whose answer is one shell command (`agent = "plain"`).

Terminus-2's prompt has about 780 tokens, and its answers are JSON; a model of 135 million parameters writes none. Here
a turn has about 50 tokens of prompt and 12 of answer.

What is done with an answer:

- Its first line that is no fence (```` ``` ````) and not empty is the command; a leading `$ ` is dropped.
- A line that was cut at the answer's length is no command.
- The command runs in the task's folder in a shell of its own, for at most `command_timeout_s`. Its output is the next
  turn's prompt, if there is a next turn: `max_turns` is 1 unless the run file says otherwise.
- The command `exit`, an answer without a command, a cut answer and the last turn end the run. The state is graded.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, override

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.llms.base import ContextLengthExceededError, LLMResponse, OutputLengthExceededError
from harbor.models.agent.context import AgentContext

from harbortrainer.trials.agent import make_client, separate_thinking
from harbortrainer.trials.faults import RolloutEnd
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.plain_format import LOOP_PROMPT, SYSTEM_PROMPT, command_of
from harbortrainer.trials.provider_faults import exceeded_limit
from harbortrainer.trials.record import TurnTokens
from harbortrainer.trials.tokens import to_rollout_details

_MAX_OUTPUT = 4000
"""Characters of a command's output in the next prompt."""


class PlainAgent(BaseAgent):
    """An agent whose answer is one shell command; takes Terminus-2's arguments about the model and these.

    Args:
        max_turns: Most answers. None for 1.
        command_timeout_s: Time limit of a command, in seconds.
        model_retries: Retries of a failed model call.
        model_timeout_s: Timeout of one answer, in seconds.
        model: What else Terminus-2 takes about the model: `api_base`, `model_info`, `temperature`, ...
    """

    def __init__(
        self,
        logs_dir: Path,
        *,
        max_turns: int | None = None,
        command_timeout_s: int = 10,
        model_retries: int = 2,
        model_timeout_s: float = 600.0,
        **model: Any,
    ) -> None:
        super().__init__(logs_dir, **model)
        self._max_turns, self._command_timeout_s = max_turns or 1, command_timeout_s
        limits = {"retries": model_retries, "timeout_s": model_timeout_s}
        self._client = make_client(model | {"model_name": self.model_name or ""}, **limits)

    @staticmethod
    @override
    def name() -> str:
        return "plain"

    @override
    def version(self) -> str:
        return "1"

    @property
    def turn_tokens(self) -> list[TurnTokens]:
        """Sampled tokens of each call, over all steps; empty without `collect_rollout_details`."""
        return self._client.turns

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        """Do nothing: the agent runs in this process."""

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        client, self._client.waited_s = self._client, 0.0
        turns_before, usage_before = len(client.turns), client.usage.model_copy()
        ending: Outcome | None = None
        try:
            ending = await self._run_turns(instruction.strip(), environment, context)
        except ContextLengthExceededError:
            ending = Outcome.context_limit
        except RolloutEnd as end:
            ending = end.ending
        finally:
            context.metadata = (context.metadata or {}) | {
                "ending": ending.value if ending else None,
                "model_s": client.waited_s,
            }
            context.n_input_tokens = client.usage.prompt_tokens - usage_before.prompt_tokens
            context.n_output_tokens = client.usage.completion_tokens - usage_before.completion_tokens
            context.n_cache_tokens = client.usage.cache_tokens - usage_before.cache_tokens
            context.rollout_details = to_rollout_details(client.turns[turns_before:])
            await client.aclose()

    async def _run_turns(self, prompt: str, environment: BaseEnvironment, context: AgentContext) -> Outcome | None:
        """Run turns until one ends the run. Return the limit that ended it; None if the model did."""
        system = SYSTEM_PROMPT if self._max_turns == 1 else LOOP_PROMPT
        history = [{"role": "system", "content": system}]
        for turn in range(1, self._max_turns + 1):
            context.metadata = (context.metadata or {}) | {"n_episodes": turn}
            answer, command, cut = await self._next_command(prompt, history)
            ends = command in ("", "exit")
            output = "" if ends else await self._run_command(command, environment)
            if cut:
                return Outcome.output_limit
            if ends:
                return None
            thinking = {"reasoning_content": answer.reasoning_content} if answer.reasoning_content else {}
            history += [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer.content, **thinking},
            ]
            prompt = output
        return None if self._max_turns == 1 else Outcome.turn_limit

    async def _next_command(self, prompt: str, history: list[dict[str, str]]) -> tuple[LLMResponse, str, bool]:
        """Return the next answer, its command, and whether the answer was cut at its length."""
        try:
            answer, cut = await self.request(prompt, history), False
        except OutputLengthExceededError as error:
            answer, cut = LLMResponse(content=error.truncated_response or ""), True
        return answer, command_of(separate_thinking(answer).content, cut=cut), cut

    async def request(self, prompt: str, history: Sequence[Mapping[str, str]]) -> LLMResponse:
        """Request the next answer from the model."""
        return await self._client.call(prompt, history)

    async def _run_command(self, command: str, environment: BaseEnvironment) -> str:
        """Run a command. Return what the model gets to see of it."""
        began = time.monotonic()
        try:
            done = await environment.exec(command, timeout_sec=self._command_timeout_s)
        except Exception as error:
            if not exceeded_limit(error, self._command_timeout_s, time.monotonic() - began):
                raise
            return f"The command took longer than {self._command_timeout_s} s and was stopped."
        output = "\n".join(text.strip() for text in (done.stdout, done.stderr) if text and text.strip())
        if len(output) > _MAX_OUTPUT:
            output = f"{output[: _MAX_OUTPUT // 2]}\n...\n{output[-_MAX_OUTPUT // 2 :]}"
        return output or f"(no output, exit code {done.return_code})"
