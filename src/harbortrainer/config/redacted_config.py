"""Redaction of a run's config for publishing: no secrets and no local paths.

Contract: all tables are kept. An absolute path becomes `.../` and its last part; a relative path is unchanged.
Environment variables, headers and text under keys such as `api_key`, `token` or `password` are omitted.
"""

import re

from harbortrainer.config.table import TomlTable

SECRET = re.compile(r"(api_?key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
OMITTED_KEYS = ("env_vars", "headers", "output_dir")
REDACTED = ".../"
"""How a redacted path begins."""
LOCAL_PATH = re.compile(r"(?:file://)?[/~]")


def redact(config: TomlTable) -> TomlTable:
    """Return a redacted copy of a config."""
    return {key: redact_value(value) for key, value in config.items() if not is_omitted(key, value)}


def is_omitted(key: str, value: object) -> bool:
    """Return whether an entry is omitted."""
    return key in OMITTED_KEYS or (isinstance(value, str) and SECRET.search(key) is not None)


def redact_value(value: object) -> object:
    """Return a redacted copy of a value."""
    if isinstance(value, dict):
        return redact(value)
    if isinstance(value, list):
        return [redact_value(item) for item in value]
    if isinstance(value, str) and LOCAL_PATH.match(value):
        return redact_path(value)
    return value


def redact_path(path: str) -> str:
    """Replace a path by `.../` and its last part."""
    return f"{REDACTED}{path.rstrip('/').rpartition('/')[2]}"
