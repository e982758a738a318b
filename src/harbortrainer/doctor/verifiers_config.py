"""Validation of the tables `env`, `serve` and `renderer` with the classes of verifiers and renderers.

verifiers loads the plugin, so the plugin's keys are checked too. These packages take seconds to import, so they are
imported only here. harbor is not imported.
"""

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial

from pydantic import BaseModel, TypeAdapter, ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.config.orchestrator_config import SourceConfig
from harbortrainer.config.plugin import PLUGIN_ID
from harbortrainer.config.prime_rl_run import PrimeRun, sources_of
from harbortrainer.config.prime_rl_schema import value_types
from harbortrainer.config.runfile import RunConfig
from harbortrainer.config.table import TomlTable, lookup
from harbortrainer.errors import UserError, first_line, joined
from harbortrainer.runs.display import loading

ID_KEYS = {"taskset": "taskset.id", "harness": "agent.harness.id", "environment": "id"}
"""Key in `env` of the id of each kind of plugin."""

_RENDERER = "orchestrator.renderer"

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
        UserError: All mistakes, with their dotted keys.
    """
    raise_all(errors(run, file))


def check_sources(sources: Mapping[str, SourceConfig], file: str) -> None:
    """Check sources, given by dotted key.

    Raises:
        UserError: All mistakes, with their dotted keys.
    """
    raise_all(source_errors({key: (source.env, source.serve) for key, source in sources.items()}, file))


def raise_all(found: list[UserError]) -> None:
    """Raise the mistakes as one error, if there are any."""
    if error := joined(found):
        raise error


def errors(run: RunConfig | PrimeRun, file: str) -> list[UserError]:
    """Return the mistakes in every source of a run and its renderer."""
    sources = {key: (source.env, source.serve) for key, source in sources_of(run).items()}
    found = [*source_errors(sources, file), *renderer_errors(dict(run.orchestrator.renderer), file)]
    return found or (unnamed_format(run, file) if isinstance(run, PrimeRun) else [])


def source_errors(sources: Mapping[str, tuple[TomlTable, TomlTable]], file: str) -> list[UserError]:
    """Return the mistakes in the tables `env` and `serve` of sources, by the sources' dotted keys."""
    with loading("verifiers and the plugin", "verifiers"):
        import verifiers.v1 as vf

    found: list[UserError] = []
    for key, (env, serve) in sources.items():
        checks = [partial(check_env, env, file, f"{key}.env")]
        if key.startswith("orchestrator.train."):
            checks.append(partial(refuse_own_sampling, env, file, f"{key}.env.agent"))
        checks.append(partial(check_table, vf.ServeConfig, serve, file, f"{key}.serve"))
        found += filter(None, map(error_in, checks))
    return found


def error_in(check: Callable[[], None]) -> UserError | None:
    """Return the error that a check raises."""
    try:
        check()
    except UserError as error:
        return error
    return None


def check_table(kind: type[BaseModel], table: TomlTable, file: str, where: str) -> None:
    """Raise `UserError` if a table is invalid."""
    with explained(file, where, kind.model_fields):
        kind.model_validate(table)


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
        UserError: Unknown keys, invalid values, or a plugin that cannot be imported.
    """
    known = known_keys(env)
    for key, taken in known.items():
        if isinstance(lookup(dict(env), key), bool) and not taken & {"bool", "any"}:
            raise UserError("is not true or false", where=f"{file}: {where}.{key}", do="set its value")
    found = error_in(partial(_resolve_env, env, file, where, known))
    if found is not None:
        # verifiers does not read the rest of an agent whose harness is wrong
        agent = env.get("agent")
        rest = {key: value for key, value in agent.items() if key != "harness"} if isinstance(agent, dict) else {}
        further = error_in(partial(_resolve_env, {**env, "agent": rest}, file, where, known))
        raise (joined([found, further]) if further else None) or found


def _resolve_env(env: Mapping[str, object], file: str, where: str, known: Iterable[str]) -> None:
    import verifiers.v1 as vf

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
    message = first_line(error)
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


def renderer_errors(renderer: TomlTable, file: str) -> list[UserError]:
    """Return the mistakes in `[orchestrator.renderer]`."""
    from renderers import RendererConfig

    def check() -> None:
        with explained(file, _RENDERER):
            TypeAdapter(RendererConfig).validate_python({"name": "auto"} | renderer)

    return [error for error in [error_in(check)] if error]


def unnamed_format(run: PrimeRun, file: str) -> list[UserError]:
    """Return the error of "auto" on Prime-RL for a model whose chat format it does not know."""
    from harbortrainer.environment.renderers_compat import known_format

    model, table = run.model.name, {"name": "auto"} | dict(run.orchestrator.renderer)
    if table["name"] != "auto" or known_format(model) is not None:
        return []
    do = f'set name in [{_RENDERER}], e.g. "qwen3" for Qwen3 and models with its chat format, else "default"'
    return [UserError(f"{model!r} has no known chat format", where=f"{file}: {_RENDERER}.name", do=do)]
