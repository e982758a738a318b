"""One rollout is one trial of Harbor's, run in this process.

Contract: `launch` runs the trial with every model call going to verifiers' interception endpoint (or, with
`capture = "rollout_details"`, straight to the server, whose token ids are then committed), leaves the trial's
record on `trace.info["harbor"]`, and never turns a failed trial into a reward: what did not train is an error
of the trace.
Invariant: importing this module imports neither harbor nor litellm; the first `launch` (or `warm`) does.
"""

from verifiers.v1.clients import ModelContext
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from harbortrainer.environment.capture import TokensMissingError, commit_turns
from harbortrainer.environment.config import HarborHarnessConfig
from harbortrainer.environment.phases import engine_failure
from harbortrainer.environment.retries import failure
from harbortrainer.environment.scoring import put_record, record_of
from harbortrainer.environment.slots import slot
from harbortrainer.environment.specs import trial_spec
from harbortrainer.environment.state import live
from harbortrainer.environment.taskset import HarborTaskData
from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import Failure, TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.spec import TrialSpec


class HarborHarness(Harness[HarborHarnessConfig]):
    """Plays a Harbor task as Harbor's own trial."""

    # The model's commands run in the trial's sandbox, never in verifiers' runtime, which is only this
    # process.
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run the trial; leave its record on the trace and its failure, if any, on the state."""
        if not isinstance(data, HarborTaskData):
            raise TypeError("harbor_env plays Harbor tasks; use it with the taskset harbor_env")
        state = live(trace)
        spec = trial_spec(self.config, ctx, trace, data, endpoint, secret)
        async with slot(self.config.trials_folder, self.config.n_parallel_envs):
            record = await run_trial(spec, on_event=state.phases.on_event, stop=lambda: trace.stop_condition)
        record = self._captured(_blame_the_engine(record, trace), trace, spec)
        put_record(trace, record)
        state.failure = failure(record, state.attempts)
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _captured(self, record: TrialRecord, trace: Trace, spec: TrialSpec) -> TrialRecord:
        """With `rollout_details`, put the tokens of a trial that trains on the trace, or fail the trial."""
        if self.config.capture != "rollout_details" or not record.outcome.trains:
            return record
        try:
            commit_turns(trace, record.turn_tokens, spec.model.name if spec.model else "")
        except TokensMissingError as error:
            return _engine_error(record, type(error).__name__, str(error))
        return record

    async def cleanup(self, trace: Trace, runtime: Runtime) -> None:
        """Give a failed trial its outcome's error also where verifiers had recorded another one first."""
        error = live(trace).failure if record_of(trace) is not None else None
        if error is not None and not any(known.message == str(error) for known in trace.errors):
            trace.record_error(error)


def _blame_the_engine(record: TrialRecord, trace: Trace) -> TrialRecord:
    """A limit that the agent ran into because its model calls failed is the engine's fault."""
    error = engine_failure(trace)
    if error is None or not record.outcome.trains:
        return record
    return _engine_error(record, error.type, error.message)


def _engine_error(record: TrialRecord, kind: str, message: str) -> TrialRecord:
    error = Failure(type=kind, message=message)
    return record.model_copy(update={"outcome": Outcome.model_error, "reward": None, "error": error})
