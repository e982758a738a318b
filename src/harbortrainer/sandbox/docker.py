"""Harbor's Docker environment, stopped at once and labelled with the run.

Everything that builds, starts and grades stays Harbor's. An overlay, last in the list of compose files, gives the
`main` service an init process and no grace period (Harbor's default command ignores SIGTERM, so that every stock trial
waits ten seconds for its end) and the label `harbortrainer.run`, by which a launcher finds what a killed run left.
Invariant: a container of a run carries the run's label, or belongs to the compose project of one that does.
"""

import json
import os
from pathlib import Path
from typing import override

from harbor.environments.docker.docker import DockerEnvironment

from harbortrainer.sandbox.names import RUN_VARIABLE

RUN_LABEL = "harbortrainer.run"


def overlay(run: str) -> dict:
    """The compose file that is laid over Harbor's, as a dictionary (JSON is YAML)."""
    main = {"init": True, "stop_grace_period": "0s", "labels": {RUN_LABEL: run}}
    return {"services": {"main": main}}


class LabelledDocker(DockerEnvironment):
    """Harbor's `docker`, with containers that end at once and carry the run's label."""

    @property
    @override
    def _docker_compose_paths(self) -> list[Path]:
        path = self.trial_paths.trial_dir.resolve() / f"{self.session_id}.compose.json"
        if not path.exists():
            path.write_text(json.dumps(overlay(os.environ.get(RUN_VARIABLE, "none"))))
        return [*super()._docker_compose_paths, path]
