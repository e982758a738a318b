"""The embedded sampler: transformers' continuous batching behind an inference server's endpoints.

    with Sampler("outputs/warmup", seed=1) as sampler:
        ...  # requests to sampler.url
        sampler.load_adapter(learner.weights(1), version=1, config=lora_config)

Contract:
    - The returned log-probabilities belong to the distribution that the tokens were drawn from.
    - The same prompt, parameters and seed give the same tokens, whatever else is in the batch.
    - One policy version samples a whole request.
"""

from harbortrainer.engines.local.sampler.completion_log import Completion, CompletionLog
from harbortrainer.engines.local.sampler.sampler import Sampler

__all__ = ["Completion", "CompletionLog", "Sampler"]
