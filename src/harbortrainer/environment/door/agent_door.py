"""The way from an agent in a sandbox to the model: a small server of one trial's, before verifiers' endpoint.

It speaks what agents speak (`answers.ROUTES`, each also as a stream of events) and asks verifiers' endpoint for plain
chat completions, where tokens are captured as for any other agent. It listens on the host, and in a sandbox with a
network of its own on a socket made inside, at the same address.

Invariants: nobody is served without the trial's own key, nor after the agent's time; nothing but the routes is served;
the key of verifiers' endpoint never reaches an agent, and the agent's own key never a message of the model's.
"""

import secrets
import socket
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import aiohttp
from aiohttp import web
from pydantic import SecretStr

from harbortrainer.environment.door.answers import Counter

_BACKLOG = 128


@runtime_checkable
class ListensInside(Protocol):
    """An environment whose sandbox can have a network of its own, on this machine."""

    async def listen_inside(self, port: int) -> socket.socket | None:
        """A socket that listens at `port` of the loopback inside; None where the host's own is seen there."""
        ...


class AgentDoor:
    """One trial's. An asynchronous context manager.

    Args:
        endpoint: verifiers', which ends in /v1.
        secret: Its bearer token.
        host: The address of this machine that the agent's sandbox reaches.
        name: What the sandbox calls that address.
    """

    def __init__(self, endpoint: str, secret: str, *, host: str, name: str) -> None:
        self.key = SecretStr(secrets.token_urlsafe(24))
        """What the agent has to show."""
        self._endpoint, self._secret, self._host, self._name = endpoint, secret, host, name
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._inside: object = None

    @property
    def url(self) -> str:
        """Where the agent asks, from inside and from the host; ends in /v1."""
        return f"http://{self._name}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        listening = socket.create_server((self._host, 0), backlog=_BACKLOG)
        self._port = listening.getsockname()[1]
        self._upstream = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._counter = Counter(self._upstream, self._endpoint, self._secret, self.key.get_secret_value())
        self._runner = web.AppRunner(self._counter.application(), access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self._upstream.close()

    async def open(self, environment: object) -> None:
        """The agent begins: answer it, from inside of its sandbox too."""
        assert self._runner is not None
        self._counter.serves = True
        if self._inside is not environment and isinstance(environment, ListensInside):
            self._inside = environment
            if (listening := await environment.listen_inside(self._port)) is not None:
                await web.SockSite(self._runner, listening).start()

    def shut(self) -> None:
        """The agent's time is over: what it left running is not answered any more."""
        self._counter.serves = False

    @property
    def refusals(self) -> str:
        """What was asked for that is not served, in words; "" when there was nothing."""
        return "; ".join(self._counter.refused)
