"""Keys of a task.toml that Harbor silently ignores, such as misspelled ones.

For example, `timeout` in `[verifier]` sets no timeout, and with `enviroment_mode` the verifier shares the sandbox.
`memory` and `storage` need a unit: Harbor ignores numbers there.
Contract: a key is returned as it is written in the file, without list indices. Tables that Harbor does not read, and
keys outside of tables, belong to the author and are not returned. Invariant: `KNOWN` matches Harbor's models;
`tests/tasks/test_ignored_keys.py` compares them.
"""

from collections.abc import Iterator

from harbortrainer.config.table import TomlTable

_NETWORK = {"network_mode", "allowed_hosts"}
KNOWN: dict[str, set[str]] = {
    "agent": {*_NETWORK, "timeout_sec", "user"},
    "verifier": {*_NETWORK, "timeout_sec", "env", "user", "environment_mode", "environment", "collect"},
    "collect": {"command", "service", "timeout_sec", "user"},
    "environment": {
        *_NETWORK,
        *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "tpu"),
        *("mcp_servers", "env", "skills_dir", "healthcheck", "workdir", "allow_internet", "memory", "storage"),
    },
    "healthcheck": {"command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec", "retries"},
    "solution": {"env"},
    "steps": {"name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"},
}
"""Keys that Harbor reads, by the name of their table."""
_TEXT_ONLY = ("memory", "storage")
"""Keys of `[environment]` that Harbor reads only as text."""


def ignored_keys(config: TomlTable) -> list[str]:
    """Return the ignored keys of a task.toml, each once."""
    return list(dict.fromkeys(_of_tables(config, "")))


def _of_tables(table: TomlTable, above: str) -> Iterator[str]:
    for name, found in table.items():
        if name in KNOWN:
            for one in found if isinstance(found, list) else [found]:
                if isinstance(one, dict):
                    yield from (f"{above}{name}.{key}" for key in one if key not in KNOWN[name])
                    if name == "environment":
                        numbers = [key for key in _TEXT_ONLY if not isinstance(one.get(key, ""), str)]
                        yield from (f"{above}{name}.{key} without a unit (write {key}_mb)" for key in numbers)
                    yield from _of_tables(one, f"{above}{name}.")
