"""What task and harness share while one rollout runs. It never leaves the process."""

from pydantic import ConfigDict, Field
from verifiers.v1.errors import RolloutError
from verifiers.v1.state import State
from verifiers.v1.trace import Trace

from harbortrainer.environment.phases import Phases
from harbortrainer.environment.retries import Attempts, failure


def live(trace: Trace) -> "HarborState":
    """The live part of a rollout of ours."""
    if not isinstance(trace.state, HarborState):
        raise TypeError("not a rollout of a Harbor task; use the taskset harbor_env")
    return trace.state


class HarborState(State):
    """The live part of a rollout."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    attempts: Attempts = Field(default_factory=Attempts)
    """The failures of the episode so far; shared by its attempts."""
    phases: Phases = Field(default_factory=Phases)
    """When the agent's phases ended."""
    failure: RolloutError | None = Field(default_factory=lambda: failure(None, Attempts()))
    """Why the trace does not train; until the trial has come to an end, that it did not."""
