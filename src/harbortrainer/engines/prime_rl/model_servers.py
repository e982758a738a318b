"""The model servers that a Prime-RL run calls in its trials, read from its run file.

Contract: every server that the pinned Prime-RL puts into a request is listed. Other requests are refused.
"""

from collections.abc import Generator

from harbortrainer.config.reader import RawRun
from harbortrainer.environment.request_check import POLICY_KEY_VARIABLE, ModelServer

DEFAULT_URL = "http://localhost:8000/v1"
"""Prime-RL's default of `orchestrator.model.client.base_url`."""


def model_servers(raw: RawRun) -> list[ModelServer]:
    """Return the policy's server, and the frozen models that algorithms sample from.

    Args:
        raw: The run file.
    """
    client = raw.get("orchestrator.model.client", {})
    variable = _text(client, "api_key_var", POLICY_KEY_VARIABLE)
    if raw.get("slurm") is not None or raw.get("deployment.type", "single_node") != "single_node":
        # Prime-RL chooses the address when the job has its nodes.
        urls: list[str | None] = [None]
    elif url := _text(client, "base_url", ""):
        urls = [url]
    else:
        server = raw.get("inference.server", {})
        port = server.get("port", 8000) if isinstance(server, dict) else 8000
        urls = [DEFAULT_URL, f"http://{_text(server, 'host', 'localhost')}:{port}/v1"]
    policy = [ModelServer(base_url=url, api_key_var=variable) for url in dict.fromkeys(urls)]
    return policy + list(_frozen(raw.get("orchestrator", {})))


def _frozen(table: object) -> Generator[ModelServer]:
    """Yield the servers of all `algo` tables below a table."""
    if isinstance(table, list):
        for entry in table:
            yield from _frozen(entry)
    elif isinstance(table, dict):
        for name, value in table.items():
            if name == "algo":
                yield from _servers_in(value)
            elif name != "env":
                yield from _frozen(value)


def _servers_in(table: object) -> Generator[ModelServer]:
    if isinstance(table, dict):
        if url := _text(table, "base_url", ""):
            yield ModelServer(base_url=url, api_key_var=_text(table, "api_key_var", POLICY_KEY_VARIABLE))
        for value in table.values():
            yield from _servers_in(value)


def _text(table: object, key: str, default: str) -> str:
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) and value else default
