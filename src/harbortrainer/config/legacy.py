"""Translation of old Prime-RL key names on load, and in the file by `harbortrainer config upgrade`.

Contract: the upgraded text differs only in the keys that the note names; comments are not kept. A key without an exact
translation is refused with advice (`REMOVED`).

Settings in `args` of `[[orchestrator.env]]` and the current keys:

    tasks_dir         env.taskset.tasks_dir
    environment_type  env.agent.harness.environment_type
    max_turns         env.agent.max_turns
    n_parallel_envs   env.agent.harness.n_parallel_envs, a hard cap over all workers, and
                      orchestrator.concurrency.max_inflight, so that no trial waits for a slot
    vllm_base_url     orchestrator.model.client.base_url, the address of the served policy
    model_name        model.name, the served policy
"""

import re
import shlex
import tomllib
from urllib.parse import urlsplit

import tomlkit
from tomlkit.exceptions import TOMLKitError

from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.prime_rl_schema import needs_reasoning_parser
from harbortrainer.config.table import TomlTable, TomlValue, lookup
from harbortrainer.errors import UserError

TABLES = {
    "wandb": "monitors.wandb",
    "orchestrator.sampling": "orchestrator.train.sampling",
    "trainer.model.experimental.lora": "trainer.model.lora",
    "trainer.experimental.lora": "trainer.model.lora",
    "inference.model": "inference.vllm",
    "inference.parallel": "inference.vllm",
}
KEYS = {
    "ckpt.keep": "keep_last",
    "inference.model.name": "model",
    "inference.parallel.dp": "data_parallel_size",
    "inference.parallel.tp": "tensor_parallel_size",
    "orchestrator.eval.rollouts_per_example": "group_size",
    "orchestrator.eval.sampling.max_tokens": "max_completion_tokens",
    "orchestrator.rollouts_per_example": "group_size",
    "orchestrator.sampling.max_tokens": "max_completion_tokens",
    "orchestrator.train.sampling.max_tokens": "max_completion_tokens",
}
GPUS = {"inference_gpu_ids": "num_infer_gpus", "trainer_gpu_ids": "num_train_gpus"}
ASYNC = ("async_level", "max_async_level", "orchestrator.async_level", "orchestrator.max_async_level")
REMOVED = dict.fromkeys(ASYNC, "remove it and set orchestrator.max_off_policy_steps") | {
    "orchestrator.buffer": "remove it; [orchestrator.train.source.curriculum] replaces it",
    "orchestrator.env_mix": "remove it and set ratio in each source",
    "orchestrator.oversampling_factor": "remove it; [orchestrator.concurrency] limits the trials in flight",
    "orchestrator.trajectory_strategy": "remove it; samples are merged wherever the history allows it",
}
ENTRIES = {"orchestrator.env": "orchestrator.train.source", "orchestrator.eval.env": "orchestrator.eval.source"}
ARGS = {
    "tasks_dir": str,
    "environment_type": str,
    "max_turns": int,
    "n_parallel_envs": int,
    "vllm_base_url": str,
    "model_name": str,
}
ENTRY_KEYS = ("id", "name", "args", "num_examples", "interval", "ratio", "rollouts_per_example")


def upgrade(text: str, file: str) -> tuple[str, list[str]]:
    """Translate a run file to current key names.

    Args:
        text: Text of the file.
        file: Name of the file, for errors.

    Returns:
        The new text, and at most one note on what was translated. No note if nothing is old or the text is not TOML.

    Raises:
        UserError: An old key has no translation.
    """
    notes = []
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        try:
            data = tomlkit.parse(text).unwrap()
        except TOMLKitError:
            return text, []
        notes = ["the file was read as TOML 1.1, because it has multi-line inline tables"]
    if translated := _Run(data, file).translate():
        do = f"`harbortrainer config upgrade {shlex.quote(file)}` updates the file"
        notes = [f"old keys translated: {', '.join(translated)}; {do}"]
    return (tomlkit.dumps(data), notes) if notes else (text, [])


class _Run:
    """Tables of a run file. Methods that return a list change the tables and return the translations."""

    def __init__(self, data: TomlTable, file: str) -> None:
        self._data, self._file = data, file

    def translate(self) -> list[str]:
        """Translate all old keys."""
        done = [*self._rename_keys(), *self._move_tables(), *self._count_gpus(), *self._translate_entries()]
        for path, do in REMOVED.items() if done else ():
            if self._get(path) is not None:
                raise self._error("this key no longer exists", path, do)
        return done

    def _rename_keys(self) -> list[str]:
        renamed = {path: new for path, new in KEYS.items() if self._get(path) is not None}
        for path, new in renamed.items():
            self._put(f"{path.rpartition('.')[0]}.{new}", self._pop(path))
        return [f"{path} -> {new}" for path, new in renamed.items()]

    def _move_tables(self) -> list[str]:
        moved = {old: new for old, new in TABLES.items() if isinstance(self._get(old), dict)}
        for old, new in moved.items():
            self._put(new, self._pop(old))
        return [f"[{old}] -> [{new}]" for old, new in moved.items()]

    def _count_gpus(self) -> list[str]:
        counted = {old: self._data.pop(old) for old in GPUS if old in self._data}
        for old, devices in counted.items():
            if not isinstance(devices, list):
                raise self._error("must be a list of devices", old, "change the value")
            self._put(f"deployment.{GPUS[old]}", len(devices))
        return [f"{old} -> deployment.{GPUS[old]} = {len(devices)}" for old, devices in counted.items()]

    def _translate_entries(self) -> list[str]:
        found = {old: entries for old in ENTRIES if isinstance(entries := self._get(old), list)}
        for old, entries in found.items():
            for number, entry in enumerate(entries):
                _check_entry(entry, f"{self._file}: {old}[{number}]")
            sources = [_source(entry) for entry in self._pop(old)]
            if isinstance(existing := self._get(ENTRIES[old]), list):
                existing += sources
            else:
                self._put(ENTRIES[old], sources)
        if found:
            self._spread([entry.get("args", {}) for entries in found.values() for entry in entries])
        return [f"[[{old}]] -> [[{ENTRIES[old]}]]" for old in found]

    def _spread(self, settings: list[TomlTable]) -> None:
        """Move settings of the whole run to their current keys."""

        def given(setting: str) -> list:
            return list(dict.fromkeys(args[setting] for args in settings if setting in args))

        if (caps := given("n_parallel_envs")) and not self._get("orchestrator.concurrency.max_inflight"):
            group = self._get("orchestrator.group_size")
            self._put("orchestrator.concurrency.max_inflight", max(*caps, group if isinstance(group, int) else 1))
        for name in given("model_name"):
            self._put_once("model.name", name, "model_name")
        self._name_parsers()
        for url in given("vllm_base_url"):
            self._put_once("orchestrator.model.client.base_url", url, "vllm_base_url")
            self._follow_port(url)

    def _put_once(self, key: str, value: str, setting: str) -> None:
        existing = self._get(key)
        if existing and existing != value:
            what = f"{value!r} contradicts {key} = {existing!r}"
            raise self._error(what, f"orchestrator.env.args.{setting}", "keep one of the two")
        if not existing:
            self._put(key, value)

    def _name_parsers(self) -> None:
        """Set the chat format and reasoning parser of Qwen3 models, which old files did not need.

        Prime-RL's "auto" recognizes few names. Without a parser, a chat completion contains the thinking.
        """
        name = str(self._get("model.name"))
        if re.match(r"Qwen/Qwen3-\d", name) and self._get("orchestrator.renderer") is None:
            self._put("orchestrator.renderer", {"name": "qwen3", "thinking_retention": "all"})
        is_open = self._get("inference") is not None and self._get("inference.vllm.reasoning_parser") is None
        if is_open and needs_reasoning_parser(name):
            self._put("inference.vllm.reasoning_parser", "qwen3")

    def _follow_port(self, url: str) -> None:
        """Set the port of the server that `rl` starts to the port of `vllm_base_url`."""
        port = urlsplit(url).port
        is_open = self._get("inference") is not None and self._get("inference.server.port") is None
        if is_open and port not in (None, 8000):
            self._put("inference.server.port", port)

    def _get(self, path: str) -> TomlValue:
        return lookup(self._data, path)

    def _pop(self, path: str) -> TomlValue:
        """Remove a value, and its table if that becomes empty."""
        table, _, key = path.rpartition(".")
        holder = self._get(table) if table else self._data
        value = holder.pop(key)
        if not holder and table:
            self._pop(table)
        return value

    def _put(self, path: str, value: TomlValue) -> None:
        """Add a value; a table is merged into an existing one."""
        for key in reversed(path.split(".")):
            value = {key: value}
        self._merge(self._data, value, "")

    def _merge(self, table: TomlTable, new: TomlTable, prefix: str) -> None:
        for key, value in new.items():
            if key not in table:
                table[key] = value
            elif isinstance(value, dict) and isinstance(table[key], dict):
                self._merge(table[key], value, f"{prefix}{key}.")
            else:
                raise self._error("both the old and the current key are set", f"{prefix}{key}", "keep one of the two")

    def _error(self, what: str, path: str, do: str) -> UserError:
        return UserError(what, where=f"{self._file}: {path}", do=do)


def _source(entry: TomlTable) -> TomlTable:
    """Convert a checked entry to a source with current keys."""
    args = entry.get("args", {})

    def chosen(*settings: str) -> TomlTable:
        return {setting: args[setting] for setting in settings if setting in args}

    harness = {"id": PLUGIN_ID, **chosen("environment_type", "n_parallel_envs")}
    agent = {**chosen("max_turns"), "harness": harness}
    names = {key: "group_size" if key == "rollouts_per_example" else key for key in entry if key not in ("id", "args")}
    own = {new: entry[key] for key, new in names.items()}
    return {**own, "env": {"taskset": {"id": PLUGIN_ID, **chosen("tasks_dir")}, "agent": agent}}


def _check_entry(entry: object, where: str) -> None:
    do = "write it as [[orchestrator.train.source]]"
    if not isinstance(entry, dict) or entry.get("id") != PLUGIN_ID:
        plugin = entry.get("id") if isinstance(entry, dict) else entry
        do += f"; only {PLUGIN_ID!r} is translated"
        raise UserError(f"environment {plugin!r} cannot be translated", where=where, do=do)
    for key in entry:
        if key not in ENTRY_KEYS or (key == "args" and not isinstance(entry[key], dict)):
            raise UserError("cannot be translated", where=f"{where}.{key}", do=do)
    for setting, value in entry.get("args", {}).items():
        if setting not in ARGS:
            advice = f"old entries support {', '.join(ARGS)}; write the rest as [[orchestrator.train.source]]"
            raise UserError("unknown setting", where=f"{where}.args.{setting}", do=advice)
        if not isinstance(value, ARGS[setting]) or isinstance(value, bool):
            what = f"must be {'an integer' if ARGS[setting] is int else 'a string'}, not {value!r}"
            raise UserError(what.replace("\n", " "), where=f"{where}.args.{setting}", do="change the value")
