"""Which environment servers a run needs.

One a source, as in Prime-RL, except that sources of our own plugin which differ only in the tasks they choose share
one: their requests carry the task, and each server costs an import of litellm (seconds of CPU, 250 MB).
"""

import copy
import json
from collections.abc import Iterable
from typing import Any

from harbortrainer.config.source import Source as SourceConfig
from harbortrainer.engines.local.envserver import EnvServer
from harbortrainer.errors import UserError
from harbortrainer.runs.folder import RunFolder
from harbortrainer.runs.label import RUN_VARIABLE, run_label

PLUGIN = "harbor_env"


def server_key(env: dict[str, Any], serve: dict[str, Any]) -> str:
    """Sources with the same key can share a server."""
    env = copy.deepcopy(env)
    taskset = env.get("taskset") or {}
    if taskset.get("id") == PLUGIN:
        env["taskset"] = {key: taskset[key] for key in ("id", "task") if key in taskset}
    return json.dumps([env, serve], sort_keys=True, default=str)


def plan_servers(sources: Iterable[SourceConfig], run: RunFolder) -> dict[str, EnvServer]:
    """The servers of these sources, by `server_key`; none is started.

    Raises:
        UserError: A source reads its tokens where the embedded engine cannot prove them.
    """
    variables = {RUN_VARIABLE: run_label(run.path), "HARBORTRAINER_TRIALS_DIR": str(run.trials)}
    servers: dict[str, EnvServer] = {}
    for source in sources:
        refuse_rollout_details(source)
        key = server_key(source.env, source.serve)
        if key not in servers:
            name = f"{source.resolved_name}-{len(servers)}"
            log = run.log / f"env_{name}.log"
            servers[key] = EnvServer(name, source.env, source.serve, log=log, variables=variables)
    return servers


def refuse_rollout_details(source: SourceConfig) -> None:
    """Direct calls to the sampler carry no session, so their tokens could not be told apart in its ledger."""
    harness = (source.env.get("agent") or {}).get("harness") or {}
    if harness.get("capture") == "rollout_details":
        raise UserError(
            'the embedded engine reads tokens at the interception endpoint only, not with capture = "rollout_details"',
            where=f"source {source.resolved_name!r}: env.agent.harness.capture",
            do="leave capture out, or use the engine prime-rl",
        )
