"""Checks the tables of a run file that belong to others: `env`, `serve` and `renderer`, with their own classes.

Contract: verifiers' classes read `env` and `serve`, so the plugin's keys are checked too; the renderers package's
read `renderer`. They are imported only here, since that takes a second; harbor is not.
"""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from harbortrainer.config.explain import explain
from harbortrainer.config.reader import RawRun
from harbortrainer.errors import UserError


def check(raw: RawRun) -> None:
    """Check every source of a run file and its renderer.

    Raises:
        UserError: With the dotted key of what is wrong.
    """
    for kind in ("train", "eval"):
        for index, source in enumerate(raw.get(f"orchestrator.{kind}.source") or []):
            where = f"orchestrator.{kind}.source[{index}]"
            check_env(source.get("env") or {}, raw.file, f"{where}.env")
            check_serve(source.get("serve") or {}, raw.file, f"{where}.serve")
    check_renderer(raw.get("orchestrator.renderer"), str(raw.get("model.name", "")), raw.file)


def check_env(env: dict[str, Any], file: str, where: str) -> None:
    """One `env` table.

    Raises:
        UserError: A key that does not exist, a value that cannot be, a plugin that cannot be imported.
    """
    from verifiers.v1.utils.loaders import resolve_env_config

    try:
        config = resolve_env_config(env)
    except ValidationError as error:
        raise explain(error, file, prefix=where, known=_fields(env, where)) from None
    except ModuleNotFoundError as error:
        do = f"install the package of {error.name!r}, or correct the id"
        raise UserError(f"no such plugin: {error.name}", where=f"{file}: {where}", do=do) from None
    for kind in environment_types(config):
        _check_type(kind, f"{file}: {where}.agent.harness.environment_type")


def environment_types(config: Any) -> list[str]:
    """Where the sandboxes of an environment run; nothing for environments that are not ours."""
    harness = getattr(getattr(config, "agent", None), "harness", None)
    kind = getattr(harness, "environment_type", None)
    return [kind] if kind else []


def check_serve(serve: dict[str, Any], file: str, where: str) -> None:
    """One `serve` table.

    Raises:
        UserError: A key that does not exist, or a value that cannot be.
    """
    from verifiers.v1.configs.serve import ServeConfig

    try:
        ServeConfig.model_validate(serve)
    except ValidationError as error:
        raise explain(error, file, prefix=where, known=[f"{where}.{key}" for key in ServeConfig.model_fields]) from None


def check_renderer(renderer: dict[str, Any] | None, model: str, file: str) -> None:
    """`[orchestrator.renderer]`, and that "auto" knows the model.

    Raises:
        UserError: A key that does not exist, or a model whose chat format has to be named.
    """
    from renderers import RendererConfig
    from renderers.base import MODEL_RENDERER_MAP

    where = "orchestrator.renderer"
    if renderer is not None:
        try:
            TypeAdapter(RendererConfig).validate_python({"name": "auto"} | renderer)
        except ValidationError as error:
            raise explain(error, file, prefix=where) from None
    if (renderer or {}).get("name", "auto") == "auto" and model and model not in MODEL_RENDERER_MAP:
        do = f'set name in [{where}], such as "qwen3" for Qwen3 and what has its chat format, or "default"'
        raise UserError(f"{model!r} has no known chat format", where=f"{file}: {where}.name", do=do)


def _check_type(kind: str, where: str) -> None:
    from harbortrainer.sandbox.names import environment_config

    if kind in ("local", "docker") or ":" in kind:
        return
    try:
        environment_config(kind)
    except UserError as error:
        raise UserError(error.what, where=where, do=error.do) from None


def _fields(env: dict[str, Any], where: str) -> list[str]:
    """Dotted keys of the plugin's tables, to propose the nearest one."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.utils.loaders import harness_config_type, taskset_config_type

    taskset = str((env.get("taskset") or {}).get("id") or "")
    harness = str(((env.get("agent") or {}).get("harness") or {}).get("id") or taskset or "bash")
    tables: dict[str, Any] = {"": EnvConfig, "agent.": AgentConfig}
    if taskset:
        tables["taskset."] = taskset_config_type(taskset)
    tables["agent.harness."] = harness_config_type(harness)
    return [f"{where}.{prefix}{key}" for prefix, table in tables.items() for key in table.model_fields]
