"""Prints every dotted key of Prime-RL's run file with the kinds of value that it takes, one a line, for
`src/harbortrainer/config/prime_rl_keys.txt`.

    PYTHONPATH=prime-rl/packages/prime-rl-configs/src python tools/schema_snapshot.py

`key.*` marks a table that takes any key. The tables `env`, `serve` and `renderer` belong to other packages and are
not entered.
"""

import typing

from prime_rl.configs.rl import RLConfig  # ty: ignore[import-not-found]
from pydantic import BaseModel

from harbortrainer.config.prime_rl_schema import EXTERNAL_TABLES, tables, value_types


def walk(table: type[BaseModel], prefix: str, found: dict[str, set[str]]) -> None:
    """Collect the keys of a table."""
    if table.model_config.get("extra") == "allow":
        found.setdefault(f"{prefix}*", set()).add("any")
    for name, field in table.model_fields.items():
        key, inner = f"{prefix}{name}", tables(field.annotation)
        found.setdefault(key, set()).update(value_types(field.annotation))
        is_dict = typing.get_origin(field.annotation) is dict or (not inner and "dict" in str(field.annotation))
        if is_dict or (name in EXTERNAL_TABLES and inner):
            found.setdefault(f"{key}.*", set()).add("any")
        else:
            for each in inner:
                walk(each, f"{key}.", found)


if __name__ == "__main__":
    keys: dict[str, set[str]] = {}
    walk(RLConfig, "", keys)
    print("\n".join(f"{key} {','.join(sorted(keys[key]))}" for key in sorted(keys)))
