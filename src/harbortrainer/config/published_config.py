"""A run's config as it may leave this machine: without paths of it, and without what may be a secret.

Contract: every table stays; a path of this machine becomes its last part behind `.../`; what a process was told by its
environment is left out, and so is text under a name like api_key, token, password. Relative paths stay.
"""

import re

from harbortrainer.config.table import TomlTable

SECRET = re.compile(r"(api_?key|token|secret|password|passwd|credentials?|authorization)$", re.IGNORECASE)
LEFT_OUT = ("env_vars", "headers", "output_dir")
PATH_OF_THIS_MACHINE = re.compile(r"(?:file://)?[/~]")


def published(config: TomlTable) -> TomlTable:
    """The config without what others must not see. The argument is not changed."""
    return {key: told(value) for key, value in config.items() if not hidden(key, value)}


def hidden(key: str, value: object) -> bool:
    """Whether an entry is left out."""
    return key in LEFT_OUT or (isinstance(value, str) and SECRET.search(key) is not None)


def told(value: object) -> object:
    """A value as others may see it."""
    if isinstance(value, dict):
        return published(value)
    if isinstance(value, list):
        return [told(item) for item in value]
    if isinstance(value, str) and PATH_OF_THIS_MACHINE.match(value):
        return nameless(value)
    return value


def nameless(path: str) -> str:
    """A path of this machine as its last part."""
    return f".../{path.rstrip('/').rpartition('/')[2]}"
