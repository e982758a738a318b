"""One Harbor trial: config, agent, outcome, rewards. Importing this package imports neither harbor nor litellm."""

from harbortrainer.trials.outcome import Outcome
from harbortrainer.trials.record import TrialRecord
from harbortrainer.trials.runner import run_trial
from harbortrainer.trials.trial_spec import ModelEndpoint, TrialSpec

__all__ = ["ModelEndpoint", "Outcome", "TrialRecord", "TrialSpec", "run_trial"]
