"""Agents that send their requests from inside the sandbox, for use by import path. They need only bash there."""

import base64
import json
import os
from typing import Any, ClassVar

from harbor.agents.base import BaseAgent
from harbor.agents.installed import base
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}


class InsideAgent(BaseAgent):
    """Calls chat completions with a bash tool until an answer has no tool call."""

    def __init__(self, *args: Any, extra_env: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, extra_env=extra_env, **kwargs)
        self._env = extra_env or {}

    @staticmethod
    def name() -> str:
        return "inside-agent"

    def version(self) -> str | None:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        self._environment = environment

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        messages: list[dict] = [{"role": "user", "content": instruction}]
        while True:
            status, reply = await self.post("/chat/completions", {"messages": messages, "tools": [BASH]})
            assert status == 200, reply
            answer = json.loads(reply)["choices"][0]["message"]
            messages.append(answer)
            if not answer.get("tool_calls"):
                return
            for call in answer["tool_calls"]:
                result = await environment.exec(json.loads(call["function"]["arguments"])["command"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.stdout or ""})

    async def post(self, path: str, body: dict, key: str | None = None) -> tuple[int, str]:
        """Send a request from inside the sandbox; return the status and body of the reply."""
        host, _, rest = self._env["OPENAI_BASE_URL"].removeprefix("http://").partition(":")
        port, _, base = rest.partition("/")
        key = self._env["OPENAI_API_KEY"] if key is None else key
        content = json.dumps({"model": "any", **body}).encode()
        head = f"POST /{base}{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        packed = base64.b64encode(head.encode() + content).decode()
        command = f"exec 3<>/dev/tcp/{host}/{port} && base64 -d <<<'{packed}' >&3 && cat <&3"
        result = await self._environment.exec(command, timeout_sec=30)
        assert not result.stdout or result.stdout.startswith("HTTP/"), f"{host}:{port}: {result.stdout}"
        headers, _, reply = (result.stdout or "").partition("\r\n\r\n")
        return int(headers.split()[1]) if headers else 0, reply


class ProbingAgent(InsideAgent):
    """Sends requests that must be refused, then acts as InsideAgent; `observed` has their statuses and the API key."""

    observed: ClassVar[dict[str, int | str]] = {}

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        type(self).observed = {
            "another key": (await self.post("/chat/completions", {"messages": []}, key="guessed"))[0],
            "no key": (await self.post("/chat/completions", {"messages": []}, key=""))[0],
            "another path": (await self.post("/embeddings", {}))[0],
            "parent path": (await self.post("/../state", {}))[0],
            "no request": (await self.post("/chat/completions", {"messages": 3}))[0],
            "key": self._env["OPENAI_API_KEY"],
        }
        await super().run(instruction, environment, context)


class FloodingAgent(InsideAgent):
    """Floods the proxy from eight processes, then acts as InsideAgent; `observed` has the status lines of the flood."""

    observed: ClassVar[list[str]] = []

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        host, _, rest = self._env["OPENAI_BASE_URL"].removeprefix("http://").partition(":")
        port, _, base = rest.partition("/")
        head = rf"POST /{base}/chat/completions HTTP/1.1\r\nHost: a\r\nx-api-key: {self._env['OPENAI_API_KEY']}\r\n"
        head += r"Content-Length: 200000000\r\n\r\n"
        one = f"exec 3<>/dev/tcp/{host}/{port}; printf '{head}' >&3; head -c 200M /dev/zero >&3 & head -n 1 <&3"
        script = f'for n in $(seq 8); do bash -c "{one}" & done 2> /dev/null; wait'
        result = await environment.exec(script, timeout_sec=120)
        type(self).observed = str(result.stdout).splitlines()
        await super().run(instruction, environment, context)


class WrongPathAgent(InsideAgent):
    """Requests only a path that is not served, and ends without an error."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        await self.post("/embeddings", {})


class OneCallAgent(InsideAgent):
    """Sends one request, and ends with an error that holds the status, of the type that Harbor derives since 0.25."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        status, _ = await self.post("/chat/completions", {"messages": [{"role": "user", "content": instruction}]})
        failure = getattr(base, "UnknownApiError", base.NonZeroAgentExitCodeError)
        raise failure(f"Command failed (exit 1): API Error: {status}")


class KeyForwardingAgent(InsideAgent):
    """Passes the run's API keys to a command, as some of Harbor's agents do; `observed` has its variables."""

    observed: ClassVar[list[str]] = []

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        keys = {name: value for name, value in os.environ.items() if name.endswith("_API_KEY")}
        result = await environment.exec("env | grep _API_KEY", env=keys)
        type(self).observed = sorted((result.stdout or "").split())
        await super().run(instruction, environment, context)


class UninstallableAgent(BaseInstalledAgent):
    """Fails to install because there is no network, even on a machine with Harbor's agents."""

    @staticmethod
    def name() -> str:
        return "openhands-sdk"

    async def install(self, environment: BaseEnvironment) -> None:
        await self.exec_as_root(environment, "echo no such host >&2; exit 6")

    def populate_context_post_run(self, context: AgentContext) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        raise AssertionError("it was not installed")
