"""Model servers of this process, which `ChatClient` calls without HTTP."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping

type Endpoint = Callable[[Mapping[str, str], bytes], Coroutine[object, None, tuple[int, bytes]]]
"""Answers a request, given its headers and body, with a status and a body."""

ENDPOINTS: dict[tuple[asyncio.AbstractEventLoop, str], Endpoint] = {}
"""The servers, by their event loop and the address of their chat completions."""
