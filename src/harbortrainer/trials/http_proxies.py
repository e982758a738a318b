"""The HTTP proxies of the environment (`HTTP_PROXY`, `ALL_PROXY`, ...), which must not come between local programs.

Rule: a model server with an http:// address is reached directly; https:// goes through the proxy. Our own clients
follow the rule themselves. The clients of verifiers, LiteLLM and Prime-RL read the environment, so it is changed for
them.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable, MutableMapping
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOCAL = ("localhost", "127.0.0.1", "::1")


def proxy_variables(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Return the names of the set proxy variables."""
    return [name for lower in _PROXIES for name in (lower.upper(), lower) if environ.get(name)]


def unusable_proxies(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Return the variables with a SOCKS proxy, if its library is missing: each httpx client would then raise."""
    socks = [name for name in proxy_variables(environ) if urlsplit(environ[name]).scheme.startswith("socks")]
    return [] if socks and importlib.util.find_spec("socksio") else socks


def bypass_proxies(urls: Iterable[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Have programs reach this machine and the http:// servers of `urls` directly.

    Extends NO_PROXY. Removes the proxies that no httpx client can use, with a warning.
    """
    for name in unusable_proxies(environ):
        logger.warning("%s is ignored: a SOCKS proxy needs socksio (pip install socksio)", name)
        del environ[name]
    if not proxy_variables(environ):
        return
    hosts = [*_LOCAL, *(host for url in urls if url.startswith("http://") and (host := urlsplit(url).hostname))]
    # Programs read either spelling, and some prefer the lower one.
    known = [host.strip() for name in ("no_proxy", "NO_PROXY") for host in environ.get(name, "").split(",")]
    if "*" not in known:
        value = ",".join(dict.fromkeys(filter(None, [*known, *hosts])))
        environ["no_proxy"] = environ["NO_PROXY"] = value
