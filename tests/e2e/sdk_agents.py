"""An agent on the host that uses the official client library of each API dialect, for use by import path."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from anthropic import AsyncAnthropic
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from inside_agents import BASH
from openai import AsyncOpenAI

TOOL: dict[str, Any] = BASH["function"]
_PARAMETERS = TOOL["parameters"]
_SYSTEM = "Be brief."
type RunCommand = Callable[[str], Awaitable[str]]


class SdkAgent(BaseAgent):
    """Runs commands with a tool until an answer has no tool call.

    Args:
        dialect: `chat`, `messages` or `responses`.
        stream: Whether answers are streamed.
        keep_reasoning: Whether reasoning items of `responses` keep their text in the history; codex removes it.
    """

    def __init__(
        self,
        *args: Any,
        dialect: str,
        stream: bool,
        keep_reasoning: bool = True,
        extra_env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, extra_env=extra_env, **kwargs)
        self._converse, self._stream, self._env = getattr(self, f"_{dialect}"), stream, extra_env or {}
        self._excluded = {"parsed_arguments"} if keep_reasoning else {"parsed_arguments", "content"}

    @staticmethod
    def name() -> str:
        return "sdk-agent"

    def version(self) -> str | None:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        async def run_command(command: str) -> str:
            return (await environment.exec(command)).stdout or ""

        await self._converse(instruction, run_command)

    def _openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self._env["OPENAI_BASE_URL"], api_key=self._env["OPENAI_API_KEY"])

    async def _chat(self, instruction: str, run_command: RunCommand) -> None:
        history: list[Any] = [{"role": "developer", "content": _SYSTEM}, {"role": "user", "content": instruction}]
        async with self._openai() as client:
            while True:
                request: dict[str, Any] = {"model": "gpt-5", "messages": history, "tools": [BASH]}
                if self._stream:
                    async with client.chat.completions.stream(**request) as stream:
                        answer = (await stream.get_final_completion()).choices[0]
                else:
                    answer = (await client.chat.completions.create(**request)).choices[0]
                history.append(answer.message.model_dump(exclude_none=True, exclude={"parsed"}))
                assert answer.finish_reason == ("tool_calls" if answer.message.tool_calls else "stop")
                if not answer.message.tool_calls:
                    return
                for call in answer.message.tool_calls:
                    output = await run_command(json.loads(call.function.arguments)["command"])
                    history.append({"role": "tool", "tool_call_id": call.id, "content": output})

    async def _messages(self, instruction: str, run_command: RunCommand) -> None:
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": instruction}]}]
        tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": _PARAMETERS}]
        client_options: dict[str, Any] = {
            "base_url": self._env["ANTHROPIC_BASE_URL"],
            "api_key": self._env["ANTHROPIC_API_KEY"],
        }
        async with AsyncAnthropic(**client_options) as client:
            while True:
                request: dict[str, Any] = {
                    "model": "claude",
                    "max_tokens": 400,
                    "system": "Be brief.",
                    "messages": history,
                    "tools": tools,
                }
                if self._stream:
                    async with client.messages.stream(**request) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**request)
                history.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
                uses = [block for block in answer.content if block.type == "tool_use"]
                assert answer.stop_reason == ("tool_use" if uses else "end_turn")
                if not uses:
                    return
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": use.id,
                        "content": await run_command(str(use.input["command"])),
                    }
                    for use in uses
                ]
                history.append({"role": "user", "content": results})

    async def _responses(self, instruction: str, run_command: RunCommand) -> None:
        history: list[Any] = [{"role": "user", "content": instruction}]
        tools = [{"type": "function", "name": TOOL["name"], "parameters": _PARAMETERS, "strict": False}]
        async with self._openai() as client:
            while True:
                request: dict[str, Any] = {
                    "model": "gpt-5",
                    "input": history,
                    "tools": tools,
                    "store": False,
                    "instructions": _SYSTEM,
                }
                if self._stream:
                    async with client.responses.stream(**request) as stream:
                        answer = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**request)
                history += [self._history_item(item) for item in answer.output]
                calls = [item for item in answer.output if item.type == "function_call"]
                if not calls:
                    return
                for call in calls:
                    output = await run_command(json.loads(call.arguments)["command"])
                    history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})

    def _history_item(self, item: Any) -> dict:
        excluded = self._excluded if item.type == "reasoning" else {"parsed_arguments"}
        return item.model_dump(exclude_none=True, exclude=excluded)
