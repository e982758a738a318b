"""`[[orchestrator.env]]` with `args`, the spelling of Prime-RL before verifiers v1, in today's.

Each of the six settings keeps its meaning:

    tasks_dir         env.taskset.tasks_dir
    environment_type  env.agent.harness.environment_type
    max_turns         env.agent.max_turns
    n_parallel_envs   env.agent.harness.n_parallel_envs, a hard cap over all workers, and
                      orchestrator.concurrency.max_inflight, so that no trial waits for a place
    vllm_base_url     orchestrator.model.client.base_url, where the policy is served
    model_name        model.name, the policy that is served there
"""

import re
from typing import Any
from urllib.parse import urlsplit

from harbortrainer.config.document import Document, inline
from harbortrainer.config.toml_lines import Statement
from harbortrainer.errors import UserError

PLUGIN = "harbor_env"
SETTINGS = ("tasks_dir", "environment_type", "max_turns", "n_parallel_envs", "vllm_base_url", "model_name")
KEPT = ("name", "num_examples", "interval", "ratio")
RENAMED = {"rollouts_per_example": "group_size"}


def translate(document: Document, kind: str, file: str) -> list[dict[str, Any]]:
    """Rewrite every `[[orchestrator.env]]` (kind "train") or `[[orchestrator.eval.env]]` (kind "eval").

    Returns:
        The `args` of each.

    Raises:
        UserError: An environment that is not ours, or a setting that is none of the six.
    """
    old = "orchestrator.env" if kind == "train" else "orchestrator.eval.env"
    new = f"orchestrator.{kind}.source"
    entries = document.data()["orchestrator"]
    entries = entries["env"] if kind == "train" else entries["eval"]["env"]
    done, kept = [], []
    for statement in document.statements:
        if statement.table != old:
            kept.append(statement)
        elif statement.kind == "array":
            entry = _checked(entries[len(done)], f"{file}: {old}[{len(done)}]")
            done.append(entry.get("args", {}))
            kept += _section(document, statement, entry, old, new, len(done) - 1)
    document.statements = kept
    return done


def spread(document: Document, args: list[dict[str, Any]], file: str) -> None:
    """Put what belonged to the whole run where it stands today.

    Raises:
        UserError: Two places that say different things.
    """
    caps = [int(a["n_parallel_envs"]) for a in args if "n_parallel_envs" in a]
    if not args:
        return
    if caps and not document.has("orchestrator.concurrency.max_inflight"):
        group = document.data()["orchestrator"].get("group_size", 1)
        document.put("orchestrator.concurrency", "max_inflight", max(*caps, group))
    for name in dict.fromkeys(a["model_name"] for a in args if "model_name" in a):
        _once(document, "model", "name", name, "model_name", file)
    _renderer(document)
    for url in dict.fromkeys(a["vllm_base_url"] for a in args if "vllm_base_url" in a):
        _once(document, "orchestrator.model.client", "base_url", url, "vllm_base_url", file)
        _same_port(document, url)


def _checked(entry: dict[str, Any], where: str) -> dict[str, Any]:
    if entry.get("id") != PLUGIN:
        do = f"write it as [[orchestrator.train.source]]; only {PLUGIN!r} is translated"
        raise UserError(f"environment {entry.get('id')!r} is not ours", where=where, do=do)
    for key in entry.get("args", {}):
        if key not in SETTINGS:
            do = f"the old spelling has {', '.join(SETTINGS)}; write the rest as [[orchestrator.train.source]]"
            raise UserError("no such setting", where=f"{where}.args.{key}", do=do)
    for key in entry:
        if key not in ("id", "args", *KEPT, *RENAMED):
            raise UserError("no translation", where=f"{where}.{key}", do="write it as [[orchestrator.train.source]]")
    return entry


def _section(
    document: Document, header: Statement, entry: dict[str, Any], old: str, new: str, index: int
) -> list[Statement]:
    """The statements of one entry in today's spelling: its own pairs first, then the tables that `args` became."""
    body = _body(document, header, old)
    where = next((i for i, s in enumerate(body) if s.key == "args"), len(body))
    before = [_pair(s) for s in body[:where] if s.key != "id"]
    after = [_pair(s) for s in body[where + 1 :] if s.key != "id"]
    late = [s for s in after if s.kind == "pair"]
    comments = {s.key: f"  {s.comment}" for s in body if s.key in ("id", "args") and s.comment}
    text = header.text.replace(old, new, 1)
    parts = [text, *(s.text for s in (*before, *late)), _tables(new, entry.get("args", {}), comments)]
    rest = "".join(s.text for s in after if s.kind != "pair")
    return [Statement("array", new, "", "".join(parts) + rest)]


def _body(document: Document, header: Statement, old: str) -> list[Statement]:
    start = next(i for i, s in enumerate(document.statements) if s is header) + 1
    body = []
    for statement in document.statements[start:]:
        if statement.kind in ("table", "array"):
            break
        body.append(statement)
    return body


def _pair(statement: Statement) -> Statement:
    return statement.renamed(RENAMED[statement.key]) if statement.key in RENAMED else statement


def _tables(source: str, args: dict[str, Any], comments: dict[str, str]) -> str:
    lines = ["", f"[{source}.env.taskset]", f"id = {inline(PLUGIN)}{comments.get('id', '')}"]
    lines += _lines(args, "tasks_dir")
    lines += ["", f"[{source}.env.agent]", *_lines(args, "max_turns")] if "max_turns" in args else []
    lines += ["", f"[{source}.env.agent.harness]{comments.get('args', '')}", f"id = {inline(PLUGIN)}"]
    lines += [*_lines(args, "environment_type"), *_lines(args, "n_parallel_envs")]
    return "\n".join(lines) + "\n"


def _lines(args: dict[str, Any], key: str) -> list[str]:
    return [f"{key} = {inline(args[key])}"] if key in args else []


def _once(document: Document, table: str, key: str, value: str, old: str, file: str) -> None:
    said = document.data()
    for part in (*table.split("."), key):
        said = said.get(part, {}) if isinstance(said, dict) else {}
    if said and said != value:
        where = f"{file}: orchestrator.env.args.{old}"
        raise UserError(f"{value!r} is not what {table}.{key} says ({said!r})", where=where, do="keep one of the two")
    if not said:
        document.put(table, key, value)


def _renderer(document: Document) -> None:
    """Name the chat format of Qwen3 models, which the old spelling did not need to: "auto" knows only some names."""
    data = document.data()
    name = str(data.get("model", {}).get("name", ""))
    if re.match(r"Qwen/Qwen3-\d", name) and "renderer" not in data["orchestrator"]:
        document.put("orchestrator.renderer", "name", "qwen3")
        document.put("orchestrator.renderer", "thinking_retention", "all")


def _same_port(document: Document, url: str) -> None:
    """The server that `rl` itself starts must listen where `vllm_base_url` points."""
    inference = document.data().get("inference")
    port = urlsplit(url).port
    if inference is not None and port not in (None, 8000) and "port" not in inference.get("server", {}):
        document.put("inference.server", "port", port)
