"""Connections to models' servers that the trials of a worker use together.

Invariant: they are closed with the last trial that uses them, and no trial sees another's cookies.
"""

import asyncio

import aiohttp

# Less than servers keep an idle connection (uvicorn 5 s), so that none ends while a request is on its way.
_IDLE_S = 4.0


class ModelConnections:
    """Those of one event loop.

    Attributes:
        session: Sends the requests; the users' headers are each request's own.
    """

    def __init__(self, *, tls: bool) -> None:
        self._key, self._users = (asyncio.get_running_loop(), tls), 0
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=tls,  # a proxy is for servers elsewhere
        )

    @classmethod
    def join(cls, *, tls: bool) -> "ModelConnections":
        """The connections of this event loop, until `leave`; to servers that are asked by https or to others."""
        key = asyncio.get_running_loop(), tls
        if key not in _open:
            _open[key] = cls(tls=tls)
        _open[key]._users += 1
        return _open[key]

    async def leave(self) -> None:
        """One user less; the last one closes them."""
        self._users -= 1
        if not self._users:
            del _open[self._key]
            await self.session.close()


_open: dict[tuple[asyncio.AbstractEventLoop, bool], ModelConnections] = {}
