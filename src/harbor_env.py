"""The verifiers plugin `harbor_env`: Harbor tasks, run as Harbor's own trials, as a verifiers v1 environment.

Importing this module must not import harbor or litellm: it is imported at config validation in the launcher,
in the orchestrator and in every env server.
"""

from harbortrainer.environment.environment import HarborEnvironment
from harbortrainer.environment.harness import HarborHarness
from harbortrainer.environment.taskset import HarborTaskset

__all__ = ["HarborEnvironment", "HarborHarness", "HarborTaskset"]
