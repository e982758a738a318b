"""`[[orchestrator.env]]` with `args`, the spelling of Prime-RL before verifiers v1, in today's.

Each of the six settings keeps its meaning, in `args = { ... }`, as `args.key` or under `[orchestrator.env.args]`:

    tasks_dir         env.taskset.tasks_dir
    environment_type  env.agent.harness.environment_type
    max_turns         env.agent.max_turns
    n_parallel_envs   env.agent.harness.n_parallel_envs, a hard cap over all workers, and
                      orchestrator.concurrency.max_inflight, so that no trial waits for a place
    vllm_base_url     orchestrator.model.client.base_url, where the policy is served
    model_name        model.name, the policy that is served there
"""

import re
from urllib.parse import urlsplit

import tomlkit
from tomlkit.items import InlineTable

from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.reasoning import thinks_untold
from harbortrainer.config.sections import Line, Section, Sections, comment_of, pairs_in
from harbortrainer.config.table import TomlTable, lookup
from harbortrainer.errors import UserError

TABLES = {"orchestrator.env": "orchestrator.train.source", "orchestrator.eval.env": "orchestrator.eval.source"}
NUMBERS = ("max_turns", "n_parallel_envs")
SETTINGS = ("tasks_dir", "environment_type", *NUMBERS, "vllm_base_url", "model_name")
OWN = ("id", "name", "num_examples", "interval", "ratio", "rollouts_per_example")


def translate(run: Sections, file: str) -> list[str]:
    """Rewrite every `[[orchestrator.env]]` and `[[orchestrator.eval.env]]`; says which.

    Raises:
        UserError: An environment that is not ours, a setting that is none of the six, or two places that say
            different things.
    """
    said, settings = [], []
    for old, new in TABLES.items():
        entries = [section for section in run if section.table == old and section.array]
        for number, entry in enumerate(entries):
            _spell_out(run, entry)
            settings.append(_translate_entry(run, entry, new, f"{file}: {old}[{number}]"))
        if entries:
            said.append(f"[[{old}]] -> [[{new}]]")
    if said:
        _spread(run, settings, file)
    return said


def _spell_out(run: Sections, entry: Section) -> None:
    """Write each setting of an entry as `args.key`."""
    after = next(iter(run[run.index(entry) + 1 :]), None)
    if after and after.table == f"{entry.table}.args":
        run.remove(after)
        entry.lines += [Line(line.key and f"args.{line.key}", line.item, line.equals) for line in after.lines]
    for line in list(entry.lines):
        if line.key == "args" and isinstance(line.item, InlineTable):
            at = entry.lines.index(line)
            entry.lines[at : at + 1] = [*comment_of(line.item.trivia), *pairs_in(line.item, "args.")]


def _translate_entry(run: Sections, entry: Section, source: str, where: str) -> TomlTable:
    """Put today's sections in the place of an entry; gives the entry's settings."""
    lines, below = entry.lines[: entry.end], entry.lines[entry.end :]
    pairs = {line.key: line for line in lines if line.key}
    args = {key.removeprefix("args."): line for key, line in pairs.items() if key.startswith("args.")}
    _check(pairs, where)
    for key, line in args.items():
        line.key = key
    moved = [pairs["id"], *args.values()]
    entry.table, entry.lines = source, [line for line in lines if line not in moved]
    for line in entry.lines:
        line.key = "group_size" if line.key == "rollouts_per_example" else line.key
    new = _tables(source, pairs["id"], args)
    for section in (entry, *new[:-1]):
        section.lines.append(Line("", tomlkit.ws("\n")))
    new[-1].lines += below
    at = run.index(entry) + 1
    run[at:at] = new
    return {key: line.item.unwrap() for key, line in args.items()}


def _tables(source: str, plugin: Line, args: dict[str, Line]) -> list[Section]:
    """What `args` became."""

    def chosen(*settings: str) -> list[Line]:
        return [args[setting] for setting in settings if setting in args]

    harness = [Line("id", tomlkit.item(PLUGIN_ID)), *chosen("environment_type", "n_parallel_envs")]
    return [
        Section(f"{source}.env.taskset", [plugin, *chosen("tasks_dir")]),
        *[Section(f"{source}.env.agent", [line]) for line in chosen("max_turns")],
        Section(f"{source}.env.agent.harness", harness),
    ]


def _check(pairs: dict[str, Line], where: str) -> None:
    plugin = pairs["id"].item.unwrap() if "id" in pairs else None
    do = "write it as [[orchestrator.train.source]]"
    if plugin != PLUGIN_ID:
        what = f"environment {plugin!r} is not ours"
        raise UserError(what, where=where, do=f"{do}; only {PLUGIN_ID!r} is translated")
    for key in pairs:
        if key.startswith("args.") and key.removeprefix("args.") not in SETTINGS:
            six = f"the old spelling has {', '.join(SETTINGS)}; write the rest as [[orchestrator.train.source]]"
            raise UserError("no such setting", where=f"{where}.{key}", do=six)
        if key.startswith("args."):
            _check_value(key.removeprefix("args."), pairs[key].item.unwrap(), f"{where}.{key}")
        if not key.startswith("args.") and key not in OWN:
            raise UserError("no translation", where=f"{where}.{key}", do=do)


def _check_value(setting: str, value: object, where: str) -> None:
    """The translation counts with the numbers and compares the texts, before the schema has seen either."""
    wanted = int if setting in NUMBERS else str
    if not isinstance(value, wanted) or isinstance(value, bool):
        what = f"must be {'a whole number' if wanted is int else 'a text'}, not {value!r}"
        raise UserError(what.replace("\n", " "), where=where, do="change the value")


def _spread(run: Sections, settings: list[TomlTable], file: str) -> None:
    """Put what belonged to the whole run where it stands today."""

    def given(setting: str) -> list:
        return list(dict.fromkeys(args[setting] for args in settings if setting in args))

    if (caps := given("n_parallel_envs")) and not lookup(run.data(), "orchestrator.concurrency.max_inflight"):
        group = lookup(run.data(), "orchestrator.group_size", 1)
        run.put("orchestrator.concurrency", "max_inflight", max(*caps, group if isinstance(group, int) else 1))
    for name in given("model_name"):
        _once(run, "model.name", name, f"{file}: orchestrator.env.args.model_name")
    _name_the_renderer(run)
    _name_the_reasoning_parser(run)
    for url in given("vllm_base_url"):
        _once(run, "orchestrator.model.client.base_url", url, f"{file}: orchestrator.env.args.vllm_base_url")
        _same_port(run, url)


def _once(run: Sections, key: str, value: str, where: str) -> None:
    said = lookup(run.data(), key)
    if said and said != value:
        raise UserError(f"{value!r} is not what {key} says ({said!r})", where=where, do="keep one of the two")
    if not said:
        run.put(*key.rsplit(".", 1), value)


def _name_the_renderer(run: Sections) -> None:
    """Name the chat format of Qwen3 models, which the old spelling did not need to: "auto" knows only some names."""
    name = str(lookup(run.data(), "model.name", ""))
    if re.match(r"Qwen/Qwen3-\d", name) and lookup(run.data(), "orchestrator.renderer") is None:
        run.put("orchestrator.renderer", "name", "qwen3")
        run.put("orchestrator.renderer", "thinking_retention", "all")


def _name_the_reasoning_parser(run: Sections) -> None:
    """Let the server that `rl` starts tell thinking from answers: "auto" knows no parser for Qwen3 at the pin, and
    chat completions, as evaluations ask for them, would hand both to the agent as one text."""
    name = str(lookup(run.data(), "model.name", ""))
    said = lookup(run.data(), "inference.vllm.reasoning_parser")
    if lookup(run.data(), "inference") is not None and said is None and thinks_untold(name):
        run.put("inference.vllm", "reasoning_parser", "qwen3")


def _same_port(run: Sections, url: str) -> None:
    """The server that `rl` itself starts must listen where `vllm_base_url` points."""
    port = urlsplit(url).port
    inference = lookup(run.data(), "inference")
    if inference is not None and port not in (None, 8000) and "port" not in inference.get("server", {}):
        run.put("inference.server", "port", port)
