#!/bin/bash
set -euo pipefail
python3 - <<'PY'
import json
import re


def merge(base, over):
    if isinstance(base, dict) and isinstance(over, dict):
        return {k: merge(base[k], over[k]) if k in base and k in over else over.get(k, base.get(k)) for k in {**base, **over}}
    return over


def leaves(value, path=()):
    if isinstance(value, dict):
        for name, child in value.items():
            yield from leaves(child, (*path, name))
    elif value is not None:
        yield "_".join(path).upper().replace("-", "_"), value


def text(value):
    if isinstance(value, bool):
        value = int(value)
    value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return value if re.fullmatch(r"[A-Za-z0-9_./:,@-]*", value) else "'" + value.replace("'", "'\\''") + "'"


settings = merge(json.load(open("/app/conf/base.json")), json.load(open("/app/conf/production.json")))
with open("/app/service.env", "w") as out:
    out.writelines(f"{key}={text(value)}\n" for key, value in sorted(leaves(settings)))
PY
