"""Validation of the tables `env`, `serve` and `renderer` with the classes of verifiers and renderers.

verifiers loads the plugin, so the plugin's keys are checked too. These packages take seconds to import, so they are
imported only here. harbor is not imported.
"""

import difflib
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

from pydantic import TypeAdapter, ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.config.orchestrator_config import SourceConfig
from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.prime_rl_run import PrimeRun, sources_of
from harbortrainer.config.prime_rl_schema import value_types
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import lookup
from harbortrainer.errors import UserError
from harbortrainer.runs.display import loading

ID_KEYS = {"taskset": "taskset.id", "harness": "agent.harness.id", "environment": "id"}
"""Key in `env` of the id of each kind of plugin."""

RUN_WIDE_KEYS = {
    "sampling": "[orchestrator.train.sampling]",
    "model": "[model] name",
    "client": "[orchestrator.model.client]",
}
"""Keys of verifiers' agent table that a trained agent must not set, and the run's key to set instead. The learner reads
the temperature and the policy from the run's keys."""


def check(run: RunConfig | PrimeRun, file: str) -> None:
    """Check every source of a run and its renderer.

    Raises:
        UserError: A mistake, with its dotted key.
    """
    check_sources(sources_of(run), file)
    check_renderer(run, file)


def check_sources(sources: Mapping[str, SourceConfig], file: str) -> None:
    """Check sources, given by dotted key.

    Raises:
        UserError: A mistake, with its dotted key.
    """
    with loading("verifiers and the plugin", "verifiers"):
        import verifiers.v1 as vf

    for key, source in sources.items():
        check_env(source.env, file, f"{key}.env")
        if key.startswith("orchestrator.train."):
            refuse_own_sampling(source.env, file, f"{key}.env.agent")
        with explained(file, f"{key}.serve", vf.ServeConfig.model_fields):
            vf.ServeConfig.model_validate(source.serve)


@contextmanager
def explained(file: str, where: str, known: Iterable[str] = ()) -> Generator[None]:
    """Turn a `ValidationError` of a table into a `UserError` with the dotted key. `known`: the table's keys."""
    try:
        yield
    except ValidationError as error:
        raise explain(error, file, prefix=where, known=[f"{where}.{key}" for key in known]) from None


def check_env(env: Mapping[str, object], file: str, where: str) -> None:
    """Check one `env` table.

    Raises:
        UserError: An unknown key, an invalid value, or a plugin that cannot be imported.
    """
    import verifiers.v1 as vf

    known = known_keys(env)
    for key, taken in known.items():
        if isinstance(lookup(dict(env), key), bool) and not taken & {"bool", "any"}:
            raise UserError("is not true or false", where=f"{file}: {where}.{key}", do="set its value")
    try:
        with explained(file, where, known):
            vf.resolve_env_config(dict(env))
    except (ImportError, TypeError) as error:
        raise no_plugin(error, file, where) from None


def refuse_own_sampling(env: Mapping[str, object], file: str, where: str) -> None:
    """Raise `UserError` where the table of a trained agent sets its own sampling, model or client."""
    agent = env.get("agent")
    own = agent if isinstance(agent, dict) else {}
    for key, place in RUN_WIDE_KEYS.items():
        if own.get(key) is not None:
            what = "differs from what the learner assumes of training trials"
            raise UserError(what, where=f"{file}: {where}.{key}", do=f"remove it, and set {place}")


def no_plugin(error: ImportError | TypeError, file: str, where: str) -> UserError:
    """Make the error for an id without a plugin. Only verifiers' message tells which id it is."""
    message = str(error).splitlines()[0]
    named = re.match(r"(taskset|harness|environment)(?: module)? '(.*?)'", message)
    if named is None:
        return UserError(f"a plugin cannot be used: {message}", where=f"{file}: {where}", do="correct its id")
    kind, name = named.groups()
    near = difflib.get_close_matches(name, [PLUGIN_ID], n=1)
    do = f"did you mean {near[0]!r}?" if near else f"install the package of {name!r}, or correct the id"
    return UserError(f"no {kind} plugin {name!r}", where=f"{file}: {where}.{ID_KEYS[kind]}", do=do)


def known_keys(env: Mapping[str, object]) -> dict[str, frozenset[str]]:
    """Dotted keys of verifiers' tables, and of the plugin's if the taskset is ours, with their value types."""
    import verifiers.v1 as vf

    from harbortrainer.environment.plugin_config import HarborHarnessConfig, HarborTasksetConfig

    tables = {"": vf.EnvConfig.model_fields, "agent.": vf.AgentConfig.model_fields}
    taskset = env.get("taskset")
    if isinstance(taskset, dict) and taskset.get("id") == PLUGIN_ID:
        tables["taskset."] = HarborTasksetConfig.model_fields
        tables["agent.harness."] = HarborHarnessConfig.model_fields
    return {
        f"{prefix}{key}": value_types(field.annotation)
        for prefix, fields in tables.items()
        for key, field in fields.items()
    }


def check_renderer(run: RunConfig | PrimeRun, file: str) -> None:
    """Check `[orchestrator.renderer]`.

    Raises:
        UserError: An unknown key, or on Prime-RL "auto" for a model whose chat format it does not know.
    """
    from renderers import RendererConfig

    from harbortrainer.environment.renderers_compat import known_format

    where, table = "orchestrator.renderer", {"name": "auto"} | dict(run.orchestrator.renderer)
    with explained(file, where):
        TypeAdapter(RendererConfig).validate_python(table)
    if isinstance(run, PrimeRun) and table["name"] == "auto" and known_format(model := run.model.name) is None:
        do = f'set name in [{where}], e.g. "qwen3" for Qwen3 and models with its chat format, else "default"'
        raise UserError(f"{model!r} has no known chat format", where=f"{file}: {where}.name", do=do)
