"""How the train client's requests reach the sampler: httpx's over aiohttp, which halves the CPU of a request.

Contract: what httpx raises for a broken connection is raised here too, by the same names, so that who asked says of it
what it would have said.
"""

from typing import override

import aiohttp
import httpx
from yarl import URL

_IDLE_S = 4.0


class LeanTransport(httpx.AsyncBaseTransport):
    """Sends httpx's requests by aiohttp. For http:// and without a proxy; one event loop uses it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The whole answer, read.

        Raises:
            httpx.ConnectTimeout, httpx.ReadTimeout, httpx.ConnectError, httpx.ReadError: As httpx's own transport.
        """
        waits = request.extensions.get("timeout", {})
        patience = aiohttp.ClientTimeout(total=None, sock_connect=waits.get("connect"), sock_read=waits.get("read"))
        try:
            async with self._open().request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=request.headers.multi_items(),
                data=await request.aread(),
                timeout=patience,
                allow_redirects=False,
                auto_decompress=False,  # httpx does
            ) as answer:
                return httpx.Response(answer.status, headers=answer.raw_headers, content=await answer.read())
        except aiohttp.ConnectionTimeoutError as error:
            raise httpx.ConnectTimeout(str(error), request=request) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error), request=request) from error
        except aiohttp.ClientConnectorError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except aiohttp.ClientError as error:
            raise httpx.ReadError(f"{type(error).__name__}: {error}", request=request) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    @override
    async def aclose(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
