"""Agents inside the sandbox that cannot reach the model's endpoint, for use by import path."""

import os
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.installed import base
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext


class RetryingAgent(BaseAgent):
    """Tries to connect to the endpoint from inside until it succeeds."""

    def __init__(self, *args: Any, extra_env: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._url = (extra_env or dict(os.environ))["OPENAI_BASE_URL"]

    @staticmethod
    def name() -> str:
        return "retrying-agent"

    def version(self) -> str | None:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        host, port = self._url.split("/")[2].split(":")
        await environment.exec(f"bash -c 'until (exec 3<>/dev/tcp/{host}/{port}) 2>/dev/null; do sleep 0.2; done'")


class FailingAgent(RetryingAgent):
    """Ends with a connection error, of the type that Harbor derives since 0.25."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        failure = getattr(base, "NetworkConnectionError", base.NonZeroAgentExitCodeError)
        raise failure("curl: (7) Connection refused")
