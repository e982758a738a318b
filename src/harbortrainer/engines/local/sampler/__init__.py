"""The embedded sampler: transformers' continuous batching behind the endpoints of an inference server.

    with Sampler("outputs/warmup", seed=1) as sampler:
        ...  # requests to sampler.url
        sampler.load_adapter(learner.weights(1), version=1, config=lora_config)

Its contract: the log-probabilities it returns are those of the distribution it drew from; a request with the same
prompt, parameters and seed gets the same tokens, whatever else is in the batch; one request is one policy version.
"""

from harbortrainer.engines.local.sampler.ledger import Completion, Ledger
from harbortrainer.engines.local.sampler.sampler import Sampler

__all__ = ["Completion", "Ledger", "Sampler"]
