"""Final outcome of a finished trial: server faults, invalid tokens, timeouts and changed tools are decided here.

Invariants, whatever the verifier's reward is:

- A trial whose model server failed is a `model_error`.
- A trial whose first prompt exceeded the model's context, so that no token was sampled, is an `agent_error`.
"""

from dataclasses import dataclass

from verifiers.v1.clients import ModelContext
from verifiers.v1.trace import Trace

from harbortrainer.environment.model_proxy.server import ModelProxy
from harbortrainer.environment.plugin_config import HarborHarnessConfig
from harbortrainer.environment.rollout_details import commit_turns
from harbortrainer.environment.rollout_state import harbor_state
from harbortrainer.environment.verifiers_compat import agent_calls, body_locator, invalid_logprobs
from harbortrainer.errors import clauses
from harbortrainer.trials.faults import TokensMissingError
from harbortrainer.trials.model_calls import AgentCall, RecentLatencies, engine_fault
from harbortrainer.trials.outcome import AGENT_EXIT, Outcome
from harbortrainer.trials.record import Failure, TrialRecord
from harbortrainer.trials.trial_spec import TrialSpec

_PROMPT_TOO_LONG = (
    "the agent's first prompt does not fit into the model's context, so no token was sampled: "
    "raise seq_len, or use an agent or a task with a shorter prompt"
)


@dataclass(frozen=True)
class OutcomeReviewer:
    """Decides the final outcome of one rollout's trial. Called once, after the trial has ended."""

    config: HarborHarnessConfig
    ctx: ModelContext
    trace: Trace
    spec: TrialSpec
    recent: RecentLatencies
    """Latencies of the worker's answers; this trial's are added."""
    proxy: ModelProxy | None = None
    """The model proxy that the agent used."""
    wrong_logprobs: str = ""
    """Why the recorded log-probabilities do not belong to the sampled distribution; "" if they do."""

    def __call__(self, record: TrialRecord) -> TrialRecord:
        """Return the record with its final outcome.

        With `rollout_details` the tokens of a trainable trial are put on the trace.
        """
        calls = self._calls(record)
        if calls and all(call.status == "refused" for call in calls) and (record.outcome.trains or _exited(record)):
            return _untrainable(record, Outcome.agent_error, "PromptTooLongError", _PROMPT_TOO_LONG)
        if calls is not None and (fault := self._server_fault(record, calls)):
            if self.proxy is not None and self.proxy.refusals:
                fault = clauses(fault, self.proxy.refusals)
            return _untrainable(record, Outcome.model_error, "ModelServerError", fault)
        if not record.outcome.trains:
            return record
        if self.config.capture == "rollout_details":
            if self.wrong_logprobs:
                return _untrainable(record, Outcome.model_error, "ModelServerError", self.wrong_logprobs)
            try:
                model = self.spec.model.name if self.spec.model else ""
                commit_turns(self.trace, record.turn_tokens, model, body_locator(self.ctx))
            except TokensMissingError as error:
                return _untrainable(record, Outcome.model_error, type(error).__name__, str(error))
        elif fault := invalid_logprobs(self.trace):
            return _untrainable(record, Outcome.model_error, "TokensMissingError", fault)
        return self._apply_on_tampering(self._apply_agent_timeout(record))

    def _apply_on_tampering(self, record: TrialRecord) -> TrialRecord:
        if not record.changed_tools or not record.outcome.trains or self.config.on_tampering == "flag":
            return record
        if self.config.on_tampering == "zero":
            return record.model_copy(update={"reward": 0.0})
        return record.model_copy(update={"outcome": Outcome.tampered, "reward": None})

    def _calls(self, record: TrialRecord) -> list[AgentCall] | None:
        """Return the agent's model calls; None if they are unknown or the agent uses no model."""
        if not self.spec.uses_model:
            return None
        direct = self.config.capture == "rollout_details"
        return record.calls if direct else agent_calls(self.trace, harbor_state(self.trace).call_arrivals)

    def _server_fault(self, record: TrialRecord, calls: list[AgentCall]) -> str:
        self.recent.add(calls)
        if not (record.outcome.trains or (_exited(record) and not calls)):
            return ""
        return engine_fault(
            calls,
            harbor_state(self.trace).phases.finished,
            self.recent,
            endpoint=self.spec.model.base_url if self.spec.model else "",
            max_tokens=self.ctx.sampling.max_tokens,
            timed_out=record.outcome is Outcome.agent_timeout,
        )

    def _apply_agent_timeout(self, record: TrialRecord) -> TrialRecord:
        if record.outcome is not Outcome.agent_timeout or self.config.agent_timeout == "verify":
            return record
        if self.config.agent_timeout == "zero":
            return record.model_copy(update={"reward": 0.0})
        return record.model_copy(update={"outcome": Outcome.timeout_masked, "reward": None})


def _exited(record: TrialRecord) -> bool:
    """Whether an installed agent's program exited with an error; a model server's error can be the cause."""
    ended = record.error is not None and record.error.type in AGENT_EXIT
    return ended and record.outcome is Outcome.agent_error


def _untrainable(record: TrialRecord, outcome: Outcome, kind: str, message: str) -> TrialRecord:
    """Return the record without its reward, with this outcome and error; the agent's own error is appended."""
    if record.error is not None:
        message += f" ({record.error.type}: {record.error.message})"
    error = Failure(type=kind, message=message)
    return record.model_copy(update={"outcome": outcome, "reward": None, "error": error})
