"""The verifiers plugin `harbor_env`: a verifiers v1 environment that runs Harbor tasks as Harbor trials.

The launcher, the orchestrator and every env server import this module to validate a config. So importing it must not
import harbor or litellm.
"""

from harbortrainer.environment.environment import HarborEnvironment
from harbortrainer.environment.harness import HarborHarness
from harbortrainer.environment.taskset import HarborTaskset

__all__ = ["HarborEnvironment", "HarborHarness", "HarborTaskset"]
