"""The weight update: transfer of the learner's newest policy version to the sampler."""

import time

from harbortrainer.engines.local.protocols import LearnerProtocol, SamplerProtocol

ADAPTER_KEYS = ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "task_type")
"""Keys of an adapter's config that determine what it computes."""


def update_weights(learner: LearnerProtocol, sampler: SamplerProtocol) -> float:
    """Load the learner's newest version into the sampler and return the seconds it took."""
    started = time.monotonic()
    weights, adapter = learner.weights(learner.version), learner.adapter_config
    if adapter is None:
        sampler.load_weights(weights, learner.version)
    else:
        from peft import LoraConfig

        config = LoraConfig(**{key: adapter[key] for key in ADAPTER_KEYS})  # ty: ignore[invalid-argument-type]
        sampler.load_adapter(weights, learner.version, config=config)
    return time.monotonic() - started
